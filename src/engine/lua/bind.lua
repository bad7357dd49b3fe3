#!lua
-- An Idempotency-Key belongs to the body it first came with. This happens at the key's own shard, before the
-- task is put at the home of its body: two bodies under one key meet here, wherever their homes are.
-- ARGV 3 fingerprint, 4 home, 5 ttl, 6 the value that may be replaced or ''; KEYS 1 the key.
-- Returns nil, or the fingerprint and home that it is bound to.
local bound = redis.call('GET', KEYS[1])
local wanted = piece(ARGV[3]) .. piece(ARGV[4])
if bound and bound ~= wanted and bound ~= ARGV[6] then return { bound } end
redis.call('SET', KEYS[1], wanted, 'PX', ARGV[5])
return nil
