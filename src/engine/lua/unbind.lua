#!lua flags=allow-oom
-- Frees an Idempotency-Key whose task was refused, unless it is bound anew. ARGV 3 fingerprint, 4 home, 5 id; KEYS as in bind.lua.
if redis.call('GET', KEYS[2]) ~= ARGV[5] or redis.call('GET', KEYS[1]) ~= piece(ARGV[3]) .. piece(ARGV[4]) then return 0 end
redis.call('DEL', KEYS[1], KEYS[2])
return 1
