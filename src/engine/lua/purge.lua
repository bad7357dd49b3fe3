#!lua flags=allow-oom
-- Forgets a dead letter. ARGV 3 id, then the shard. Returns whether there was one.
read_shards(4)
local sh = order[1]
redis.call('ZREM', sh.base .. 'dz', ARGV[3])
return redis.call('HDEL', sh.base .. 'd', ARGV[3])
