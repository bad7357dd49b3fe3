#!lua flags=allow-oom
-- Drops the inputs of tasks that were refused. An earlier attempt of the same call may have been taken in all
-- the same, its reply lost: what has a state keeps its input.
-- ARGV: the shards from 3 on, then per task: shard's place, id
local at = read_shards(3)
while at <= #ARGV do
  local sh, id = order[tonumber(ARGV[at])], ARGV[at + 1]
  if redis.call('HEXISTS', sh.base .. 's', id) == 0 then redis.call('UNLINK', sh.base .. 'b:' .. id) end
  at = at + 2
end
return 1
