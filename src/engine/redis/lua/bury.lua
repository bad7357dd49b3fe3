#!lua flags=allow-oom
-- As `fail` for one task, and keeps it as a dead letter. KEYS 1 the bundle, 2 letters, 3 letters by time of death, 4 never written.
-- ARGV batcher, field, outcome, id, letter, time of death, most letters. Returns what `settle` does, then how many old letters made room.
local bundle, letters, times = KEYS[1], KEYS[2], KEYS[3]
local me, field, outcome, id, letter, died, most = unpack(ARGV)
local final, own, owner, meta, late = unpack(redis.call('HMGET', bundle, field, 'o' .. field, 'o', 'm', 'm' .. field))
if final then return { final == outcome and 1 or 0, 0 } end
if not (meta or late) then return { -1, 0 } end
if (own or owner or me) ~= me then return { -2, 0 } end
redis.call('HSET', bundle, field, outcome)
redis.call('HSET', letters, id, letter)
redis.call('ZADD', times, died, id)
local over = redis.call('ZCARD', times) - tonumber(most)
for _, old in ipairs(over > 0 and redis.call('ZPOPMIN', times, over) or {}) do redis.call('HDEL', letters, old) end
return { 1, math.max(0, over) }
