#!lua flags=no-writes
-- How deep the queues are, for whoever missed the bell. ARGV: the shards from 3 on.
-- Per shard: number, version, running, waiting for a retry, dead letters; then a line per stream as the bell tells it.
read_shards(3)
local lines, counts = {}, {}

local function head(sh, stream)
  local last = '0-0'
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', sh.base .. stream)) do
    for n = 1, #group, 2 do if group[n] == 'last-delivered-id' then last = group[n + 1] end end
  end
  local first = redis.call('XRANGE', sh.base .. stream, '(' .. last, '+', 'COUNT', 1)[1]
  local st = first and state_of(sh, first[2][2])
  return st and st[QUEUED] or now, st and st[DEADLINE] or now
end

for _, sh in ipairs(order) do
  local version = counters(sh)[3]
  local running = 0
  local names = redis.call('HGETALL', sh.base .. 'qs')
  for n = 1, #names, 2 do
    local stream = names[n]
    local depth = depth_of(sh, stream)
    running = running + redis.call('XLEN', sh.base .. stream) - depth
    local queued, deadline = 0, 0
    if depth > 0 then queued, deadline = head(sh, stream) end
    lines[#lines + 1] = sh.index .. '\t' .. version .. '\t' .. stream .. '\t' .. depth .. '\t' .. depth .. '\t'
      .. text(queued) .. '\t' .. text(deadline) .. '\t' .. names[n + 1]
  end
  counts[#counts + 1] = { tonumber(sh.index), running, redis.call('XLEN', sh.base .. 'w'), redis.call('HLEN', sh.base .. 'd'),
    version }
end
return { counts, table.concat(lines, '\n') }
