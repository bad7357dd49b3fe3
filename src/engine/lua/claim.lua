#!lua flags=allow-oom
-- Moves queued tasks under one lease. The caller has planned which streams to read, and how many of each;
-- it fetches the bodies itself, and runs `reap` for those that have expired. Until then these wait as for a retry that is due:
-- a request that joins one meanwhile extends its deadline, and then `reap` puts it back into its queue.
-- ARGV 3 token, 4 lease until, 5 batch frame, 6 how long that is kept, then the shards, then per stream: shard's place, stream, how many
local token, lease_until = ARGV[3], tonumber(ARGV[4])
local at = read_shards(7)
local live, expired = {}, {}

local function read(sh, stream, count)
  local key = sh.base .. stream
  -- NOACK: a list of what was delivered would say what the states say, and cost as much again.
  local reply = redis.pcall('XREADGROUP', 'GROUP', 'g', 'c', 'COUNT', count, 'NOACK', 'STREAMS', key, '>')
  if not reply then return {} end
  if not reply.err then return reply[1][2] end
  if string.find(reply.err, 'NOGROUP', 1, true) then
    -- The stream, or the group, was deleted under us.
    if redis.call('EXISTS', key) == 1 then redis.call('XGROUP', 'CREATE', key, 'g', '0') end
    return {}
  end
  error(reply.err)
end

local function take(sh, stream, count)
  local found = read(sh, stream, count)
  touch(sh, stream)
  if #found == 0 then return end
  local ids = {}
  for n, one in ipairs(found) do ids[n] = one[2][2] end
  fetch(sh, ids)
  for n, one in ipairs(found) do
    local id, st = ids[n], sh.states[ids[n]]
    leave(sh, stream, one[1])
    -- One that ended or moved on left this copy to nobody.
    if st and st[PLACE] == 'q' and st[SID] == one[1] and st[STREAM] == stream then
      if now >= st[EXPIRES] then
        expired[#expired + 1] = id
        st[SID] = redis.call('XADD', sh.base .. 'w', '*', 'i', id)
        st[STREAM], st[PLACE], st[UNTIL] = 'w', 'w', now
        keep(sh, id, st)
      else
        live[#live + 1] = { sh, id, st }
      end
    end
  end
end

while at <= #ARGV do
  take(order[tonumber(ARGV[at])], ARGV[at + 1], ARGV[at + 2])
  at = at + 3
end

local batch = ARGV[5] .. piece(tostring(#live))
local tasks = {}
for _, one in ipairs(live) do
  local sh, id, st = one[1], one[2], one[3]
  unwait(sh, st)
  st[PLACE], st[TOKEN], st[UNTIL], st[ATTEMPT] = 'r', token, lease_until, st[ATTEMPT] + 1
  if not sh.noted then
    redis.call('SET', sh.base .. 'lb:' .. token, batch, 'PX', ARGV[6])
    sh.noted = true
  end
  keep(sh, id, st)
  tasks[#tasks + 1] = id
  tasks[#tasks + 1] = st[ATTEMPT]
  tasks[#tasks + 1] = text(st[QUEUED])
end
return { tasks, close(), expired }
