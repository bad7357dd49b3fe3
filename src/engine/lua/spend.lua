#!lua flags=allow-oom
-- Spends one unit of a window that opens with the first and closes windowMs later.
-- ARGV 3 limit, 4 windowMs; KEYS 1 the window. Returns allowed, left, ms until it closes.
local limit, window = tonumber(ARGV[3]), tonumber(ARGV[4])
local value = redis.call('GET', KEYS[1])
local closes, used = after(window), 0
if value then
  local found = cmsgpack.unpack(value)
  if now < found[1] then closes, used = found[1], found[2] end
end
local allowed = used < limit
if allowed then used = used + 1 end
redis.call('SET', KEYS[1], cmsgpack.pack({ closes, used }), 'PX', 2 * window)
return { allowed and 1 or 0, math.max(0, limit - used), text(closes - now) }
