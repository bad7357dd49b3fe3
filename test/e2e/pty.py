"""Runs a command on a terminal of its own: python3 pty.py COMMAND [ARG...]

What comes on stdin is typed, what the terminal shows goes to stdout. At the end one JSON line on stderr:
how the command ended, whether the terminal was ever raw, and whether its mode is what it was.
"""
import fcntl, json, os, select, subprocess, sys, termios

master, slave = os.openpty()
before = termios.tcgetattr(slave)


def own_terminal():
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


command = subprocess.Popen(
    sys.argv[1:], stdin=slave, stdout=slave, stderr=slave, start_new_session=True, preexec_fn=own_terminal
)
was_raw = False
reading = [master, 0]
while True:
    ready, _, _ = select.select(reading, [], [], 0.05)
    was_raw = was_raw or not termios.tcgetattr(slave)[3] & termios.ICANON
    if master in ready:
        os.write(1, os.read(master, 65536))
    elif command.poll() is not None:
        break
    if 0 in ready:
        typed = os.read(0, 4096)
        if typed:
            os.write(master, typed)
        else:  # whoever typed is gone: the terminal is closed
            command.kill()
            reading.remove(0)
restored = termios.tcgetattr(slave) == before
print(json.dumps({"code": command.returncode, "was_raw": was_raw, "restored": restored}), file=sys.stderr)
