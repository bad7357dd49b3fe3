#!lua
-- Queues a dead letter again under its own id. KEYS 1 the bundle, 2 letters, 3 letters by time of death, 4 stream, 5 never written.
-- ARGV id, field, meta, entry, ms to keep the bundle, the number of this call. Returns 1 (also when it did so before), or 0 when it is no dead letter.
local bundle, letters, times, stream = unpack(KEYS)
local id, field, meta, entry, keep, call = unpack(ARGV)
if redis.call('HDEL', letters, id) == 0 then
  -- Sent again after a lost reply: a replica must confirm what this call answers.
  local again = redis.call('HGET', bundle, 'r' .. field) == call
  if again then redis.call('HSET', bundle, 'r' .. field, call) end
  return again and 1 or 0
end
redis.call('ZREM', times, id)
redis.call('HDEL', bundle, field, 'g' .. field, 's' .. field, 'p' .. field)
redis.call('HSET', bundle, 'o' .. field, '', 'w' .. field, '', 'r' .. field, call, 'm' .. field, meta)
if redis.call('PTTL', bundle) < tonumber(keep) then redis.call('PEXPIRE', bundle, keep) end
redis.call('XADD', stream, '*', 'b', entry)
return 1
