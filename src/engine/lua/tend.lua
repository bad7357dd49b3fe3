#!lua flags=allow-oom
-- The net under the net: entries that were delivered and that no lease accounts for, and streams that nobody
-- uses. Every transition is one script, so there should be nothing to find but after a failure in the middle
-- of one.
-- ARGV 3 idle for so long, 4 at most so many, then the shards.
local idle, most = ARGV[3], ARGV[4]
read_shards(5)
local mended, dropped, lost = 0, 0, 0

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
      redis.call('HDEL', sh.base .. 'cur', stream)
      touch(sh, stream)
    else
      -- The cursor is kept: from 0-0 each time, a call sees only the first of a long list, for ever.
      local cursor = redis.call('HGET', sh.base .. 'cur', stream) or '0-0'
      local reply = redis.pcall('XAUTOCLAIM', key, 'g', 'c', idle, cursor, 'COUNT', most)
      if not reply.err then
        redis.call('HSET', sh.base .. 'cur', stream, reply[1])
        lost = lost + #(reply[3] or {})
        for _, one in ipairs(reply[2]) do mend(sh, stream, one[1], one[2]) end
      end
    end
  end
  if redis.call('HLEN', sh.base .. 's') == 0 then
    local counts = counters(sh)
    counts[1], counts[2] = -sh.queued, -sh.bytes
  end
end
return { close(), mended, dropped, lost }
