#!lua flags=allow-oom
-- Renews a batcher's lease, also on a full server: a batcher that lives must not be taken for dead there. KEYS 1 its key.
-- ARGV ms, the number of this call. Returns the number of the call that began the lease: this one, if it had run out.
local began = redis.call('GET', KEYS[1])
if began then
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
  return began
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[1])
return ARGV[2]
