#!lua
-- An Idempotency-Key belongs to the body it first came with. This happens at the key's own shard, before the
-- task is put at the home of its body: two bodies under one key meet here, wherever their homes are.
-- ARGV 3 fingerprint, 4 home, 5 ttl, 6 the value that may be replaced or '', 7 id of the task, 8 how long it may take to get
-- in; KEYS 1 the key, 2 the task that is on its way in under it.
-- Returns nil; or the fingerprint and home that it is bound to, and the task that is on its way there or ''.
local bound = redis.call('GET', KEYS[1])
local wanted = piece(ARGV[3]) .. piece(ARGV[4])
if bound and bound ~= wanted and bound ~= ARGV[6] then return { bound, redis.call('GET', KEYS[2]) or '' } end
redis.call('SET', KEYS[1], wanted, 'PX', ARGV[5])
-- Of several with the same body the first one counts.
if bound == wanted then redis.call('SET', KEYS[2], ARGV[7], 'PX', ARGV[8], 'NX')
else redis.call('SET', KEYS[2], ARGV[7], 'PX', ARGV[8]) end
return nil
