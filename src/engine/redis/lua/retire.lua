#!lua flags=allow-oom
-- Deletes a consumer that has nothing pending: one that woke up may have read meanwhile. KEYS 1 stream, 2 never written.
-- ARGV group, consumer.
local stream, group, consumer = KEYS[1], ARGV[1], ARGV[2]
if #redis.call('XPENDING', stream, group, '-', '+', 1, consumer) > 0 then return 0 end
return redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer)
