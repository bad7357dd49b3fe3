#!lua flags=no-writes
-- How deep the queues are, for whoever missed the bell. ARGV: the shards from 3 on.
-- Per shard: number, running, waiting for a retry, dead letters, version, streams; then a line per stream as the bell tells it.
read_shards(3)
read_counters(order)
local lines, counts = {}, {}

local function head(sh, stream)
  local first = redis.call('XRANGE', sh.base .. stream, '(' .. delivered(sh, stream), '+', 'COUNT', 1)[1]
  local st = first and state_of(sh, first[2][2])
  return st and st[QUEUED] or now, st and st[DEADLINE] or now
end

for _, sh in ipairs(order) do
  local version, deep = sh.counters[3], 0
  local names = redis.call('HGETALL', sh.base .. 'qs')
  for n = 1, #names, 2 do
    local stream = names[n]
    local depth = depth_of(sh, stream)
    deep = deep + depth
    local queued, deadline = 0, 0
    if depth > 0 then queued, deadline = head(sh, stream) end
    lines[#lines + 1] = sh.index .. '\t' .. version .. '\t' .. stream .. '\t' .. depth .. '\t' .. depth .. '\t'
      .. text(queued) .. '\t' .. text(deadline) .. '\t' .. names[n + 1]
  end
  local waits = redis.call('XLEN', sh.base .. 'w')
  local running = math.max(0, redis.call('HLEN', sh.base .. 's') - deep - waits)
  counts[#counts + 1] = { tonumber(sh.index), running, waits, redis.call('HLEN', sh.base .. 'd'), version, #names / 2 }
end
return { counts, table.concat(lines, '\n') }
