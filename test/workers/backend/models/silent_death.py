import os
import sys

print("the GPU is on fire", file=sys.stderr)
os._exit(9)
