#!lua flags=allow-oom
-- The net under the net: entries that were delivered and are still there, and streams that nobody uses. A claim
-- deletes what it reads, in the same script, so there should be nothing to find but after a failure in the middle
-- of one.
-- ARGV 3 at most so many, then the shards.
local most = ARGV[3]
read_shards(4)
local mended, dropped = 0, 0

local function mend(sh, stream, sid, fields)
  local id = fields[2]
  local st = state_of(sh, id)
  if not st or st[SID] ~= sid or st[STREAM] ~= stream then
    leave(sh, stream, sid)
    dropped = dropped + 1
  elseif st[PLACE] == 'q' then
    enter(sh, id, st, string.match(stream, '[^:]*$'))
    leave(sh, stream, sid)
    keep(sh, id, st)
    mended = mended + 1
  end
end

for _, sh in ipairs(order) do
  for _, stream in ipairs(redis.call('HKEYS', sh.base .. 'qs')) do
    local key = sh.base .. stream
    if redis.call('XLEN', key) == 0 then
      redis.call('DEL', key)
      redis.call('HDEL', sh.base .. 'qs', stream)
      touch(sh, stream)
    else
      for _, one in ipairs(redis.call('XRANGE', key, '-', delivered(sh, stream), 'COUNT', most)) do
        mend(sh, stream, one[1], one[2])
      end
    end
  end
  if redis.call('HLEN', sh.base .. 's') == 0 then
    read_counters({ sh })
    local counts = sh.counters
    counts[1], counts[2] = -sh.queued, -sh.bytes
  end
end
return { close(), mended, dropped }
