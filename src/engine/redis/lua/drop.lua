#!lua flags=allow-oom
-- Ends a task that no batcher holds. KEYS 1 the bundle, 2 never written. ARGV field, outcome.
-- Returns 1 when it has ended like this (also before), 0 when it ended otherwise or is not there, else the batcher that holds it.
local bundle, field, outcome = KEYS[1], ARGV[1], ARGV[2]
local final, owner, other, meta, late = unpack(redis.call('HMGET', bundle, field, 'o' .. field, 'o', 'm', 'm' .. field))
if final then
  -- Written again: a replica must confirm what this call answers.
  redis.call('HSET', bundle, field, final)
  return final == outcome and 1 or 0
end
if not (meta or late) then return 0 end
if not owner then owner = other end
if owner and owner ~= '' then return owner end
redis.call('HSET', bundle, field, outcome, 'x', '1')
return 1
