#!lua flags=allow-oom
-- Decides tasks: outcome, queue, retry or dead letter. allow-oom, because finishing frees memory: a full Redis
-- that could not finish anything would stay full. Successes were written right before, each to a key of its own
-- lease (`o:`), so that a late one cannot replace what was decided; the one that counts is renamed. Where Redis
-- was too full for that they come as arguments.
-- ARGV 3 token, 4 results ttl, 5 dead letters max, 6 queueMs, 7 of all verdicts, each a `struct`: shard's place, kind,
-- attempt, how many arguments it has; then the shards, then per verdict: id, and its arguments:
--   d done     none, or where it could not be written before: the outcome as it is kept; the index under which
--              others find it ('' for none) and for how long
--   f failed   outcome frame, retryable
--   x dead     outcome frame, retryable, code, detail
--   r retry    at, spared, overdue, maxBatchSize
-- Returns a letter per verdict: t taken, l late, g gone, m its output is missing; the report; for each that ended a task,
-- in the same order, who waits for it; place and frame of those whose outcome is not the one that was given.
local token, ttl, max_letters, queue_ms = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local at = read_shards(8)

local function retry(sh, id, st, when, spared, overdue, limit)
  if spared == '1' then st[ATTEMPT] = st[ATTEMPT] - 1 end
  if overdue == '1' then st[OVERDUE] = 1 end
  if limit > 0 then st[LIMIT] = st[LIMIT] == 0 and limit or math.min(st[LIMIT], limit) end
  st[EXPIRES] = math.min(st[DEADLINE], math.max(now, when) + 1000 * queue_ms)
  if when <= now then
    enter(sh, id, st, kind_of(st))
  else
    st[SID] = redis.call('XADD', sh.base .. 'w', '*', 'i', id)
    st[STREAM], st[PLACE], st[TOKEN], st[UNTIL] = 'w', 'w', '', when
  end
  sh.queued = sh.queued + 1
  sh.bytes = sh.bytes + st[BYTES]
  keep(sh, id, st)
end

-- The record counts the attempts since, when the outcome comes from an earlier lease.
local function count_attempts(sh, id, attempt)
  local found = read_result(redis.call('GET', sh.base .. 'r:' .. id))
  local parts = pieces(found.frame, 8)
  parts[3] = tostring(attempt)
  for n, part in ipairs(parts) do parts[n] = piece(part) end
  found.frame = table.concat(parts)
  redis.call('SET', sh.base .. 'r:' .. id,
    result(found.tenant, found.retryable, found.expires, found.reusable, found.frame), 'KEEPTTL')
  return found.frame
end

-- The first good outcome wins, from whichever lease it comes.
local function done(sh, id, st, attempt, inline, index, index_ttl)
  local key, frame = sh.base .. 'r:' .. id, ''
  if index ~= '' then redis.call('SET', sh.base .. 'x:' .. index, id, 'PX', index_ttl) end
  if inline ~= '' then
    redis.call('SET', key, inline, 'PX', ttl)
  elseif redis.pcall('RENAME', sh.base .. 'o:' .. id .. '.' .. token, key).err then
    return 'm'
  end
  if st[ATTEMPT] ~= attempt then frame = count_attempts(sh, id, st[ATTEMPT]) end
  finish(sh, id, st, frame, ttl)
  return 't'
end

local function settle(sh, id, kind, attempt, a, b, c, d)
  local st = state_of(sh, id)
  if not st then
    if kind == 'd' then redis.call('UNLINK', sh.base .. 'o:' .. id .. '.' .. token) end
    return find_result(sh, id) and 'l' or 'g'
  end
  if kind == 'd' then return done(sh, id, st, attempt, a or '', b or '', c) end
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
  fail(sh, id, st, a, b, ttl, max_letters)
  return 't'
end

local verdicts, from = {}, 1
while at <= #ARGV do
  local place, kind, attempt, more
  place, kind, attempt, more, from = struct.unpack('>Hc1HB', ARGV[7], from)
  local sh = order[place]
  verdicts[#verdicts + 1] = { sh, ARGV[at], kind, attempt, at + 1, more }
  sh.wanted = sh.wanted or {}
  sh.wanted[#sh.wanted + 1] = ARGV[at]
  at = at + 1 + more
end
for _, sh in ipairs(order) do fetch(sh, sh.wanted) end

local letters = {}
for n, one in ipairs(verdicts) do
  letters[n] = settle(one[1], one[2], one[3], one[4], unpack(ARGV, one[5], one[5] + one[6] - 1))
end
local gateways, frames = {}, {}
for n = 1, #ended, 3 do
  gateways[#gateways + 1] = ended[n + 1]
  if ended[n + 2] ~= '' then
    frames[#frames + 1] = #gateways - 1
    frames[#frames + 1] = ended[n + 2]
  end
end
return { table.concat(letters), close(), gateways, frames, dropped_letters }
