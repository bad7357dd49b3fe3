#!lua flags=allow-oom
-- Does what time demands: ends what is too late, returns lost leases and due retries to their queues,
-- forgets old dead letters.
-- ARGV 3 results ttl, 4 dead letters max, 5 their ttl, 6 at most so many in one call, 7 alone from so many lost leases on,
-- 8 dead from this attempt on, 9 how many models, then the shards, then the models as name, queueMs, then, to
-- look at nothing else, tasks as shard's place, id
local ttl, max_letters, letter_ttl, most = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local alone_from, dead_from = tonumber(ARGV[7]), tonumber(ARGV[8])
local at = read_shards(10)
local queue_ms = {}
local only = at + 2 * tonumber(ARGV[9])
for n = at, only - 1, 2 do queue_ms[ARGV[n]] = tonumber(ARGV[n + 1]) end
local more, next_due = 0, math.huge
-- Inputs of dead letters pass through Lua: when so many bytes have, the rest is for the next call.
local MAX_BYTES = 1048576
local retried, dead = {}, {}
local MOST_LETTERS = most

local function late(sh, id, st, message)
  fail(sh, id, st, outcome(sh, 'DEADLINE_EXCEEDED', message, st, meta_of(sh, id)), '1', ttl, max_letters)
end

local function put_back(sh, id, st)
  local stream, sid, place = st[STREAM], st[SID], st[PLACE]
  enter(sh, id, st, kind_of(st))
  if place ~= 'r' then leave(sh, stream, sid) end
  keep(sh, id, st)
end

local function lost(sh, id, st)
  local meta = meta_of(sh, id)
  local model = pieces(meta, 3)[3] or ''
  st[LOST] = st[LOST] + 1
  if st[ATTEMPT] >= dead_from then
    local _, body = body_of(sh, id)
    local attempts = 'all ' .. st[ATTEMPT] .. ' attempts'
    local detail = 'its lease ran out ' .. st[LOST] .. ' times: whoever ran it died or was cut off'
    bury(sh, id, st, 'INFERENCE_FAILED', detail, meta, body, max_letters)
    fail(sh, id, st, outcome(sh, 'INFERENCE_FAILED', attempts .. ' failed; it is kept as a dead letter', st, meta), '1', ttl, max_letters)
    dead[#dead + 1] = id
    dead[#dead + 1] = model
    dead[#dead + 1] = detail
    return
  end
  if st[LOST] >= alone_from then st[LIMIT] = 1 end
  -- A model that only other processes serve: its deadline must do.
  local wait_ms = queue_ms[model]
  st[EXPIRES] = wait_ms and math.min(st[DEADLINE], after(wait_ms)) or st[DEADLINE]
  sh.queued = sh.queued + 1
  sh.bytes = sh.bytes + st[BYTES]
  put_back(sh, id, st)
  retried[#retried + 1] = id
  retried[#retried + 1] = model
  retried[#retried + 1] = st[ATTEMPT]
end

local function look(sh, id)
  local st = state_of(sh, id)
  if not st then return redis.call('ZREM', sh.base .. 'due', id) end
  if st[PLACE] == 'r' then
    if now >= st[DEADLINE] then return late(sh, id, st, 'no answer before the total timeout') end
    if now >= st[UNTIL] then return lost(sh, id, st) end
  elseif now >= st[DEADLINE] or (now >= st[EXPIRES] and (st[PLACE] == 'q' or now >= st[UNTIL])) then
    return late(sh, id, st, 'it waited in the queue for too long')
  elseif st[PLACE] == 'w' and now >= st[UNTIL] then
    return put_back(sh, id, st)
  end
  st[DUE] = nil -- there is time: when it is over is written anew
  keep(sh, id, st)
end

for n = only, #ARGV, 2 do look(order[tonumber(ARGV[n])], ARGV[n + 1]) end
for _, sh in ipairs(only <= #ARGV and {} or order) do
  local due = redis.call('ZRANGEBYSCORE', sh.base .. 'due', '-inf', text(now), 'LIMIT', 0, most)
  for _, id in ipairs(due) do
    if bytes_read >= MAX_BYTES then break end
    look(sh, id)
    most = most - 1
  end
  if most == 0 or bytes_read >= MAX_BYTES then
    more = 1
    break
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', sh.base .. 'dz', '-inf', text(now - 1000 * letter_ttl), 'LIMIT', 0, MOST_LETTERS)) do
    redis.call('ZREM', sh.base .. 'dz', id)
    redis.call('HDEL', sh.base .. 'd', id)
  end
end
local report = close()
for _, sh in ipairs(order) do
  local first = redis.call('ZRANGE', sh.base .. 'due', 0, 0, 'WITHSCORES')
  if first[2] then next_due = math.min(next_due, tonumber(first[2])) end
  local letter = redis.call('ZRANGE', sh.base .. 'dz', 0, 0, 'WITHSCORES')
  if letter[2] then next_due = math.min(next_due, tonumber(letter[2]) + 1000 * letter_ttl) end
end
-- What came back from its wait may have outlived its time in the queue meanwhile.
if only > #ARGV and next_due <= now then more = 1 end
return { report, ended, next_due == math.huge and '' or text(next_due), more, retried, dead, dropped_letters }
