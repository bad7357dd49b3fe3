#!lua
-- Takes tasks in: each is answered, joined, queued or refused, in one atomic act. Its body was written right
-- before, for a while; here it is kept if the task is queued, and deleted otherwise. That a task joined another is
-- remembered for a while: the call is sent again when its reply was lost, and must not count twice.
-- No allow-oom: a full Redis refuses before anything is
-- written, and goes on finishing what it has. What all tasks of a shard need is read at once.
-- ARGV 3 gateway, 4 maxQueued, 5 maxBytes, 6 results ttl, 7 key ttl, 8 how many kinds, 9 look at it within, 10 the
--   numbers of all tasks, each a `struct`: shard's place, kind, deadline, bytes, marks (1: with a cache key of its own,
--   2: with an Idempotency-Key), 11 for how long a join is remembered, then the shards, then
--   per kind of task: tenant, family, tier, queueMs, index ttl, parameters, kind of stream ('': never queued, only
--     answered or joined)
--   per task: id, join key, and only where marked: cache key (otherwise it is the join key); digest of its
--     Idempotency-Key and fingerprint
-- Returns a letter per task: q queued, m its body is missing, or one that a list of replies explains in the same order:
-- {j, id} {d, id, frame, cached} {c, id} {f, which bound; o: never queued}; and the report.
local gateway, max_queued, max_bytes = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local ttl, key_ttl = tonumber(ARGV[6]), ARGV[7]
soon = after(tonumber(ARGV[9]))
local at = read_shards(12)
local parameters, kinds = {}, {}
local ended_before
for n = 1, tonumber(ARGV[8]) do
  kinds[n] = { tenant = ARGV[at], family = ARGV[at + 1], tier = tonumber(ARGV[at + 2]), queue_ms = tonumber(ARGV[at + 3]),
    index_ttl = ARGV[at + 4], parameters = ARGV[at + 5], stream = ARGV[at + 6] }
  at = at + 7
end

local function bind(sh, st, id, key, fingerprint)
  if key == '' then return end
  redis.call('SET', sh.base .. 'k:' .. key, piece(id) .. piece(fingerprint), 'PX', key_ttl)
  if not string.find(' ' .. st[KEYS_OF] .. ' ', ' ' .. key .. ' ', 1, true) then
    st[KEYS_OF] = st[KEYS_OF] == '' and key or st[KEYS_OF] .. ' ' .. key
  end
end

local function follow(st)
  if not string.find(',' .. st[GATEWAYS] .. ',', ',' .. gateway .. ',', 1, true) then
    st[GATEWAYS] = st[GATEWAYS] == '' and gateway or st[GATEWAYS] .. ',' .. gateway
  end
end

-- Whoever joins brings the longer patience and the better tier.
local function accommodate(sh, id, st, tier, deadline, queue_ms)
  st[DEADLINE] = math.max(st[DEADLINE], deadline)
  st[EXPIRES] = math.max(st[EXPIRES], math.min(st[DEADLINE], after(queue_ms)))
  if tier >= st[TIER] then return end
  st[TIER] = tier
  if st[PLACE] ~= 'q' then return end
  local stream, sid = st[STREAM], st[SID]
  enter(sh, id, st, string.match(stream, '[^:]*$'))
  leave(sh, stream, sid)
end

-- Somebody comes for the work of a task that is not final. A write in any case: the WAIT that follows
-- counts only from this connection's last write on.
local function join(sh, id, st)
  follow(st)
  keep(sh, id, st)
  return { 'j', id }
end

local function bound_reached(sh, bytes)
  local counts = sh.counters
  if counts[1] + sh.queued >= max_queued then return 'n' end
  if counts[2] + sh.bytes + bytes > max_bytes then return 'b' end
end

local function answer_cached(sh, id, found, tenant, key, fingerprint)
  local meta = meta_of(sh, id)
  if meta == '' then return 'm' end
  bind(sh, { [KEYS_OF] = '' }, id, key, fingerprint)
  local kept = pieces(found.frame, 8)
  local frame = piece('') .. piece(kept[2]) .. piece('0') .. piece(text(now)) .. piece(text(now)) .. piece('1')
    .. piece(kept[7]) .. piece(about(meta))
  redis.call('SET', sh.base .. 'r:' .. id, result(tenant, '0', after(ttl), 0, frame), 'PX', ttl)
  if key ~= '' then redis.call('SET', sh.base .. 'rk:' .. id, key, 'PX', ttl) end
  return { 'd', id, frame, '1' }
end

-- The task that an Idempotency-Key stands for answers, if it can.
local function keyed(sh, tenant, tier, deadline, queue_ms, key, fingerprint)
  local holder = redis.call('GET', sh.base .. 'k:' .. key)
  if not holder then return nil end
  local bound = pieces(holder, 2)
  local st = state_of(sh, bound[1])
  local found = not st and find_result(sh, bound[1])
  if (st or found) and bound[2] ~= fingerprint then return { 'c', bound[1] } end
  if st and st[TENANT] == tenant then
    accommodate(sh, bound[1], st, tier, deadline, queue_ms)
    return join(sh, bound[1], st)
  end
  if found and found.retryable == '0' and found.tenant == tenant then return { 'd', bound[1], found.frame, '0' } end
end

-- The last task with this content. One of this very call is not in the index yet.
local function indexed(sh, content)
  local id = sh.index_of[content]
  if id == nil then id = redis.call('GET', sh.base .. 'x:' .. content) end
  return id
end

-- An outcome that may be given to others: a success, and not too old.
local function reusable(sh, id)
  local value = redis.call('GET', sh.base .. 'r:' .. id)
  local found = value and read_result(value)
  return found and found.reusable > now and string.sub(found.frame, 1, 4) == '\0\0\0\0' and found or nil
end

-- By what is known already; nil when it must be queued.
local function share(sh, id, tenant, tier, deadline, queue_ms, join_key, cache, key, fingerprint)
  local reply = key ~= '' and keyed(sh, tenant, tier, deadline, queue_ms, key, fingerprint)
  if reply then return reply end
  local twin = cache ~= '' and indexed(sh, cache)
  local found = twin and reusable(sh, twin)
  if found then return answer_cached(sh, id, found, tenant, key, fingerprint) end
  local leader = twin
  if join_key ~= cache then leader = join_key ~= '' and indexed(sh, join_key) end
  local st = leader and join_key ~= '' and state_of(sh, leader)
  if st and st[TENANT] == tenant then
    if redis.call('SET', sh.base .. 'j:' .. id, '', 'NX', 'PX', ARGV[11]) then st[JOINS] = st[JOINS] + 1 end
    accommodate(sh, leader, st, tier, deadline, queue_ms)
    bind(sh, st, leader, key, fingerprint)
    return join(sh, leader, st)
  end
end

local function enter_index(sh, content, id, index_ttl)
  redis.call('SET', sh.base .. 'x:' .. content, id, 'PX', index_ttl)
  sh.index_of[content] = id
end

local function put(sh, kind, id, deadline, bytes, join_key, cache, key, fingerprint)
  local tenant, tier, queue_ms = kind.tenant, kind.tier, kind.queue_ms
  local known = state_of(sh, id)
  if known then return join(sh, id, known) end
  local found = ended_before and find_result(sh, id)
  local reply = found and { 'd', id, found.frame, '0' }
    or share(sh, id, tenant, tier, deadline, queue_ms, join_key, cache, key, fingerprint)
  local bound = not reply and (kind.stream == '' and 'o' or bound_reached(sh, bytes))
  if bound then reply = { 'f', bound } end
  if reply then
    bodies[#bodies + 1] = sh.base .. 'b:' .. id
    return reply
  end
  -- A server at its limit may refuse the body and take this call: without its body there is no task.
  if redis.call('PERSIST', sh.base .. 'b:' .. id) == 0 then return 'm' end
  local st = { 'q', '', '', kind.family, tier, 0, '', 0, 0, 0, 0, deadline, math.min(deadline, after(queue_ms)), now, bytes,
    tenant, 0, gateway, '' }
  enter(sh, id, st, kind.stream, kind.parameters)
  if kind.parameters ~= '' then parameters[st[STREAM]] = kind.parameters end
  sh.queued = sh.queued + 1
  sh.bytes = sh.bytes + bytes
  bind(sh, st, id, key, fingerprint)
  if join_key ~= '' then enter_index(sh, join_key, id, kind.index_ttl) end
  if cache ~= '' and cache ~= join_key then enter_index(sh, cache, id, kind.index_ttl) end
  keep(sh, id, st)
  return 'q'
end

local tasks, results, contents = {}, {}, {}
local numbers, from = ARGV[10], 1
while at <= #ARGV do
  local place, kind, deadline, bytes, marks
  place, kind, deadline, bytes, marks, from = struct.unpack('>HHdI4B', numbers, from)
  local sh, id, join_key = order[place], ARGV[at], ARGV[at + 1]
  at = at + 2
  local cache, key, fingerprint = join_key, '', nil
  if marks % 2 == 1 then
    cache = ARGV[at]
    at = at + 1
  end
  if marks >= 2 then
    key, fingerprint = ARGV[at], ARGV[at + 1]
    at = at + 2
  end
  tasks[#tasks + 1] = { sh, kinds[kind], id, deadline, bytes, join_key, cache, key, fingerprint }
  sh.ids = sh.ids or {}
  sh.ids[#sh.ids + 1] = id
  results[#results + 1] = sh.base .. 'r:' .. id
  if cache ~= '' then contents[#contents + 1] = { sh, cache } end
end
for _, sh in ipairs(order) do
  fetch(sh, sh.ids)
  sh.index_of = {}
end
read_counters(order)
ended_before = redis.call('EXISTS', unpack(results)) > 0
if #contents > 0 then
  local names = {}
  for n, one in ipairs(contents) do names[n] = one[1].base .. 'x:' .. one[2] end
  local found = redis.call('MGET', unpack(names))
  for n, one in ipairs(contents) do one[1].index_of[one[2]] = found[n] end
end
local letters, replies = {}, {}
for n, task in ipairs(tasks) do
  local reply = put(unpack(task, 1, 9))
  if type(reply) == 'table' then replies[#replies + 1] = reply end
  letters[n] = type(reply) == 'table' and reply[1] or reply
end
return { table.concat(letters), replies, close(parameters) }
