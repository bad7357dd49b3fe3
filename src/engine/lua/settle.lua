#!lua flags=allow-oom
-- Decides tasks: outcome, queue, retry or dead letter. allow-oom, because finishing frees memory: a full Redis
-- that could not finish anything would stay full. The outputs were written right before, each to a key of its
-- own lease, so that a late one cannot replace what was decided.
-- ARGV 3 token, 4 results ttl, 5 dead letters max, 6 queueMs, then the shards, then per verdict:
-- shard's place, id, kind, and four more:
--   d done     cache digest, cache ttl
--   f failed   outcome frame, retryable
--   x dead     outcome frame, retryable, code, detail
--   r retry    at, spared, overdue, maxBatchSize
-- Returns per verdict: t taken, l late, g gone, m its output is missing; the report; the ends.
local token, ttl, max_letters, queue_ms = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local at = read_shards(7)

local function retry(sh, id, st, when, spared, overdue, limit)
  if spared == '1' then st[ATTEMPT] = st[ATTEMPT] - 1 end
  if overdue == '1' then st[OVERDUE] = 1 end
  if limit > 0 then st[LIMIT] = st[LIMIT] == 0 and limit or math.min(st[LIMIT], limit) end
  st[EXPIRES] = math.min(st[DEADLINE], math.max(now, when) + queue_ms)
  local stream, sid = st[STREAM], st[SID]
  if when <= now then
    enter(sh, id, st, kind_of(st))
  else
    st[SID] = redis.call('XADD', sh.base .. 'w', '*', 'i', id)
    st[STREAM], st[PLACE], st[TOKEN], st[UNTIL] = 'w', 'w', '', when
  end
  leave(sh, stream, sid)
  sh.queued = sh.queued + 1
  sh.bytes = sh.bytes + st[BYTES]
  keep(sh, id, st)
end

-- The first good outcome wins, from whichever lease it comes.
local function done(sh, id, st, cache, cache_ttl)
  local ref = 'o:' .. id .. '.' .. token
  if redis.call('EXISTS', sh.base .. ref) == 0 then return 'm' end
  if cache ~= '' then
    redis.call('SET', sh.base .. 'c:' .. cache, struct.pack('>d', now + cache_ttl) .. ref, 'PX', math.max(1, cache_ttl))
  end
  finish(sh, id, st, ref, '', 0, ttl, cache ~= '' and 1 or 0)
  return 't'
end

local function settle(sh, id, kind, a, b, c, d)
  local st = state_of(sh, id)
  if not st then
    local found = find_result(sh, id)
    local ref = 'o:' .. id .. '.' .. token
    if kind == 'd' and not (found and found.ref == ref) then redis.call('UNLINK', sh.base .. ref) end
    return found and 'l' or 'g'
  end
  if kind == 'd' then return done(sh, id, st, a, tonumber(b)) end
  if st[PLACE] ~= 'r' or st[TOKEN] ~= token then return 'l' end
  if kind == 'r' then
    if c == '1' and st[OVERDUE] == 1 then return 'l' end
    retry(sh, id, st, tonumber(a), b, c, tonumber(d))
    return 't'
  end
  if kind == 'x' then
    local meta, body = body_of(sh, id)
    bury(sh, id, st, c, d, meta, body, max_letters)
  end
  finish(sh, id, st, '', a, tonumber(b), ttl)
  return 't'
end

local replies = {}
while at <= #ARGV do
  replies[#replies + 1] = settle(order[tonumber(ARGV[at])], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4],
    ARGV[at + 5], ARGV[at + 6])
  at = at + 7
end
return { replies, close(), ended, dropped_letters }
