#!lua flags=allow-oom
-- A member leaves: whatever it holds is free at once. KEYS as in beat.lua; ARGV 1 member id.
local BEATS, DOCS, LISTS, LEASES, TEXTS, _, ALIVE = unpack(KEYS)
redis.call('ZREM', BEATS, ARGV[1])
redis.call('HDEL', DOCS, ARGV[1])
redis.call('HDEL', LISTS, ARGV[1])
redis.call('HDEL', ALIVE, ARGV[1])
local leases = redis.call('HGETALL', LEASES)
for i = 1, #leases, 2 do
  if string.match(leases[i + 1], ' (.*)$') == ARGV[1] then redis.call('HDEL', LEASES, leases[i]) end
end
if redis.call('ZCARD', BEATS) == 0 then redis.call('DEL', TEXTS) end
return 1
