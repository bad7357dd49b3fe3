#!lua flags=allow-oom
-- A gateway waits no longer. KEYS 1 the bundle, 2 never written. ARGV field, gateway. Returns who still waits.
local key = 'w' .. ARGV[1]
local left = {}
for each in string.gmatch(redis.call('HGET', KEYS[1], key) or '', '[^,]+') do
  if each ~= ARGV[2] then left[#left + 1] = each end
end
local text = table.concat(left, ',')
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], key, text) end
return text
