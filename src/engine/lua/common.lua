-- What the scripts share; put in front of each when it is loaded.
--
-- Instants come from outside (ARGV[1], the shared clock, whole microseconds), so that a script is a function
-- of its arguments and of what Redis holds. Lengths of time come in milliseconds.
--
-- Bodies and outputs stay out of Lua: they are written and read by plain commands beside the script, and
-- scripts only name their keys.
--
-- A script either does everything or nothing. Redis checks memory, replicas, the disk and (by `none`, see
-- redis-scripts.ts) a moving slot before a script begins. What is left is an error of its own: no list may be
-- unpacked as a whole, because Lua refuses more than some 8000 values.

-- The fields of a task's state, kept with MessagePack in the hash `s`.
local PLACE, STREAM, SID, FAMILY, TIER, LIMIT = 1, 2, 3, 4, 5, 6 -- q queued, w waits for its retry, r running
local TOKEN, UNTIL, ATTEMPT, LOST, OVERDUE = 7, 8, 9, 10, 11 -- UNTIL: end of the lease, or time of the retry
local DEADLINE, EXPIRES, QUEUED, BYTES = 12, 13, 14, 15
local TENANT, JOINS, GATEWAYS, KEYS_OF = 16, 17, 18, 19
local DUE = 20 -- its score in `due`
local REPLAYED = 21 -- 1: it was a dead letter, and becomes one again unless it succeeds

local now = tonumber(ARGV[1])
local origin = ARGV[2] -- the process that calls; it hears of its own doings in the reply
local shards, order = {}, {}
local ended = {}
local bodies = {} -- keys of bodies to delete
local dropped_letters = 0
-- What is new is looked at by then at the latest, though its time comes later (`write_states`).
local soon = math.huge

-- Whole numbers print several times faster than others.
local function text(number) return string.format('%d', number) end
local function after(ms) return now + 1000 * ms end
local function piece(part) return struct.pack('>I4', #part) .. part end

-- The parts of a frame, up to `count` of them.
local function pieces(frame, count)
  local found, at = {}, 1
  while at <= #frame and #found < count do
    local length = struct.unpack('>I4', frame, at)
    found[#found + 1] = string.sub(frame, at + 4, at + 3 + length)
    at = at + 4 + length
  end
  return found
end

local function shard(base, index)
  local sh = shards[base]
  if sh then return sh end
  sh = { base = base, index = index, states = {}, changed = {}, touched = {}, queued = 0, bytes = 0,
    gone = {}, left = {} }
  shards[base] = sh
  order[#order + 1] = sh
  return sh
end

-- The shards of a call: how many, then base and number of each. Returns where the arguments go on.
local function read_shards(at)
  local count = tonumber(ARGV[at])
  for n = 1, count do shard(ARGV[at + 2 * n - 1], ARGV[at + 2 * n]) end
  return at + 1 + 2 * count
end

local function state_of(sh, id)
  local st = sh.states[id]
  if st == nil then
    local packed = redis.call('HGET', sh.base .. 's', id)
    st = packed and cmsgpack.unpack(packed) or false
    sh.states[id] = st
  end
  return st
end

-- Reads the states of many tasks at once.
local function fetch(sh, ids)
  for from = 1, #ids, 1000 do
    local packed = redis.call('HMGET', sh.base .. 's', unpack(ids, from, math.min(from + 999, #ids)))
    for n, value in ipairs(packed) do sh.states[ids[from + n - 1]] = value and cmsgpack.unpack(value) or false end
  end
end

-- Gives many values to a command, in steps.
local function call_each(values, call)
  for n = 1, #values, 1000 do call(unpack(values, n, math.min(n + 999, #values))) end
end

-- Of each shard: tasks and bytes that wait, and how often its queues have changed.
local function read_counters(some)
  local unread, names = {}, {}
  for _, sh in ipairs(some) do
    if not sh.counters then
      unread[#unread + 1] = sh
      names[#names + 1] = sh.base .. 'n'
    end
  end
  if #names == 0 then return end
  local found = redis.call('MGET', unpack(names))
  for n, sh in ipairs(unread) do sh.counters = found[n] and cmsgpack.unpack(found[n]) or { 0, 0, 0 } end
end

local function due_at(st)
  if st[PLACE] == 'q' then return st[EXPIRES] end
  return math.min(st[UNTIL], st[DEADLINE])
end

local function keep(sh, id, st)
  sh.states[id] = st
  sh.changed[id] = true
end

-- Notes that a stream's depth changed; with a task that came, when it did and by when it must be served.
-- Where tasks only came, the report says how many more there are; otherwise how many there are.
local function touch(sh, stream, count, queued, deadline)
  local seen = sh.touched[stream]
  if not seen then
    seen = {}
    sh.touched[stream] = seen
  end
  if not count then
    seen.left = true
    return
  end
  local last = seen[#seen]
  if last and last[2] == queued then
    last[1] = last[1] + count
    last[3] = math.min(last[3], deadline)
  else
    seen[#seen + 1] = { count, queued, deadline }
  end
end

-- The meta of a task that is not final, without its input, which may be large.
local function meta_of(sh, id)
  local key = sh.base .. 'b:' .. id
  local length = redis.call('GETRANGE', key, 0, 3)
  return #length == 4 and redis.call('GETRANGE', key, 4, 3 + struct.unpack('>I4', length)) or ''
end

-- What is kept of a task until its end: its meta and its input.
local bytes_read = 0
local function body_of(sh, id)
  local value = redis.call('GET', sh.base .. 'b:' .. id)
  if not value then return '', '' end
  bytes_read = bytes_read + #value
  local length = struct.unpack('>I4', value)
  return string.sub(value, 5, 4 + length), string.sub(value, 5 + length)
end

-- Into its queue; its old place, if it had one, is the caller's business.
local function enter(sh, id, st, kind, parameters)
  local stream = st[FAMILY] .. st[TIER] .. ':' .. kind
  local key = sh.base .. stream
  local sid = redis.call('XADD', key, 'NOMKSTREAM', '*', 'i', id)
  if not sid then
    -- '0', never '$': what was queued before the group existed is read too.
    redis.call('XGROUP', 'CREATE', key, 'g', '0', 'MKSTREAM')
    redis.call('HSET', sh.base .. 'qs', stream, parameters or pieces(meta_of(sh, id), 4)[4] or '')
    sid = redis.call('XADD', key, '*', 'i', id)
  end
  st[STREAM], st[SID], st[PLACE], st[TOKEN], st[UNTIL] = stream, sid, 'q', '', 0
  touch(sh, stream, 1, st[QUEUED], st[DEADLINE])
end

local function kind_of(st) return st[LIMIT] == 0 and '0' or tostring(st[LIMIT]) end

-- Deletes a stream entry, with others of the same stream at the end of the script. What runs has none: the claim
-- that wrote its lease deleted it.
local function leave(sh, stream, sid)
  local sids = sh.left[stream]
  if not sids then
    sids = {}
    sh.left[stream] = sids
  end
  sids[#sids + 1] = sid
  if stream ~= 'w' then touch(sh, stream) end
end

-- Out of those that wait, as far as the bounds are concerned.
local function unwait(sh, st)
  if st[PLACE] == 'r' then return end
  sh.queued = sh.queued - 1
  sh.bytes = sh.bytes - st[BYTES]
end

-- The batch that a task is in, or was in last.
local function batch_of(sh, st)
  return st[TOKEN] ~= '' and redis.call('GET', sh.base .. 'lb:' .. st[TOKEN]) or ''
end

-- What an outcome keeps of the meta of its task: its first six texts, without the parameters, which may be large
-- (`outcomeMeta` in redis-frames.ts).
local function about(meta)
  local texts = pieces(meta, 6)
  if #texts < 6 then return meta end
  return piece(texts[1]) .. piece(texts[2]) .. piece(texts[3]) .. piece('') .. piece(texts[5]) .. piece(texts[6])
end

-- The frame of an outcome that time or an owner decided.
local function outcome(sh, code, message, st, meta)
  return piece(code) .. piece(message) .. piece(text(st[ATTEMPT])) .. piece(text(st[QUEUED]))
    .. piece(text(now)) .. piece('') .. piece(batch_of(sh, st)) .. piece(about(meta))
end

-- A kept outcome begins with what scripts must know: tenant ('' when it is forgotten), whether time may heal it,
-- until when it is its owner's, until when others may reuse it. Its frame follows.
local function result(tenant, retryable, expires, reusable, frame)
  return piece(tenant) .. piece(retryable) .. piece(text(expires)) .. piece(text(reusable)) .. frame
end

local function read_result(value)
  local head = pieces(value, 4)
  local length = 16 + #head[1] + #head[2] + #head[3] + #head[4]
  return { tenant = head[1], retryable = head[2], expires = tonumber(head[3]), reusable = tonumber(head[4]),
    frame = string.sub(value, length + 1) }
end

local function find_result(sh, id)
  local value = redis.call('GET', sh.base .. 'r:' .. id)
  local found = value and read_result(value)
  return found and found.tenant ~= '' and now < found.expires and found or nil
end

-- What keeps a task alive goes with its end. The outcome itself was written before.
local function finish(sh, id, st, frame, ttl)
  if st[JOINS] > 0 or st[KEYS_OF] ~= '' then
    -- Others came for it too: it is not forgotten when one of them has read it.
    redis.call('SET', sh.base .. 'rk:' .. id, st[KEYS_OF], 'PX', ttl)
    for key in string.gmatch(st[KEYS_OF], '%S+') do redis.call('PEXPIRE', sh.base .. 'k:' .. key, ttl) end
  end
  unwait(sh, st)
  if st[PLACE] ~= 'r' then leave(sh, st[STREAM], st[SID]) end
  sh.gone[#sh.gone + 1] = id
  bodies[#bodies + 1] = sh.base .. 'b:' .. id
  sh.states[id] = false
  sh.changed[id] = nil
  ended[#ended + 1] = id
  ended[#ended + 1] = st[GATEWAYS]
  ended[#ended + 1] = frame
end

-- Keeps a task as a dead letter; past `max` the oldest letters go.
local function bury(sh, id, st, code, detail, meta, body, max)
  if max == 0 then return end
  st[REPLAYED] = nil
  local letter = piece(text(now)) .. piece(text(st[ATTEMPT])) .. piece(code) .. piece(detail) .. piece(meta) .. piece(body)
  redis.call('HSET', sh.base .. 'd', id, letter)
  redis.call('ZADD', sh.base .. 'dz', text(now), id)
  local excess = redis.call('ZCARD', sh.base .. 'dz') - max
  if excess <= 0 then return end
  for _, old in ipairs(redis.call('ZRANGE', sh.base .. 'dz', 0, excess - 1)) do
    redis.call('ZREM', sh.base .. 'dz', old)
    redis.call('HDEL', sh.base .. 'd', old)
    dropped_letters = dropped_letters + 1
  end
end

-- The end of a task by time, by its owner or by a verdict that carries its own outcome. A replayed letter goes back to
-- the list with the outcome's code and message; without `max_letters` the next ordinary letter trims the list.
local function fail(sh, id, st, frame, retryable, ttl, max_letters)
  if st[REPLAYED] == 1 then
    local said = pieces(frame, 2)
    local meta, body = body_of(sh, id)
    bury(sh, id, st, said[1], said[2], meta, body, max_letters or math.huge)
  end
  redis.call('SET', sh.base .. 'r:' .. id, result(st[TENANT], retryable, after(ttl), 0, frame), 'PX', ttl)
  finish(sh, id, st, frame, ttl)
end

-- The last entry of a stream that a claim has read.
local function delivered(sh, stream)
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', sh.base .. stream)) do
    for n = 1, #group, 2 do if group[n] == 'last-delivered-id' then return group[n + 1] end end
  end
  return '0-0'
end

local function depth_of(sh, stream) return redis.call('XLEN', sh.base .. stream) end

-- A score in `due` is never later than the instant at which `reap` must look. It may be sooner: then `reap` finds
-- that there is time, and writes the right one. Most tasks are claimed and over before that, with one score written.
local function write_states(sh)
  local states, dues = {}, {}
  local function write()
    if #states > 0 then redis.call('HSET', sh.base .. 's', unpack(states)) end
    if #dues > 0 then redis.call('ZADD', sh.base .. 'due', unpack(dues)) end
    states, dues = {}, {}
  end
  for id in pairs(sh.changed) do
    local st = sh.states[id]
    local due = due_at(st)
    if due < (st[DUE] or math.huge) then
      st[DUE] = math.min(due, soon)
      dues[#dues + 1] = text(st[DUE])
      dues[#dues + 1] = id
    end
    states[#states + 1] = id
    states[#states + 1] = cmsgpack.pack(st)
    if #states >= 1000 then write() end
  end
  write()
end

-- Writes down the tasks of one shard.
local function write_shard(sh)
  write_states(sh)
  for stream, sids in pairs(sh.left) do
    call_each(sids, function(...) redis.call('XDEL', sh.base .. stream, ...) end)
  end
  call_each(sh.gone, function(...)
    redis.call('HDEL', sh.base .. 's', ...)
    redis.call('ZREM', sh.base .. 'due', ...)
  end)
end

-- Counts what came and left.
local function count(some)
  if #some == 0 then return end
  read_counters(some)
  local values = {}
  for _, sh in ipairs(some) do
    local counts = sh.counters
    counts[1], counts[2], counts[3] = counts[1] + sh.queued, counts[2] + sh.bytes, counts[3] + 1
    values[#values + 1] = sh.base .. 'n'
    values[#values + 1] = cmsgpack.pack(counts)
  end
  redis.call('MSET', unpack(values))
end

-- Adds a line to `report` for each stream whose depth changed:
-- shard, version, stream, depth ('+': as many more as came), and for tasks that came: how many, since when,
-- by when, parameters.
local function tell_shard(sh, report, parameters)
  for stream, came in pairs(sh.touched) do
    local version = sh.counters[3]
    local line = sh.index .. '\t' .. version .. '\t' .. stream .. '\t' .. (came.left and depth_of(sh, stream) or '+')
    if #came == 0 then report[#report + 1] = line .. '\t0\t0\t0\t' end
    for _, one in ipairs(came) do
      report[#report + 1] = line .. '\t' .. one[1] .. '\t' .. text(one[2]) .. '\t' .. text(one[3]) .. '\t'
        .. (parameters[stream] or '')
    end
  end
end

-- The end of every script that moves tasks: returns the report, which all others hear on the bell.
local function close(parameters)
  local report, moved = {}, {}
  for _, sh in ipairs(order) do
    write_shard(sh)
    if next(sh.touched) or sh.queued ~= 0 or sh.bytes ~= 0 then moved[#moved + 1] = sh end
  end
  -- Of any shards: those of one call are on one server, or in one slot.
  call_each(bodies, function(...) redis.call('UNLINK', ...) end)
  count(moved)
  for _, sh in ipairs(moved) do tell_shard(sh, report, parameters or {}) end
  if #report == 0 then return '' end
  report = table.concat(report, '\n')
  redis.call('SPUBLISH', order[1].base .. 'bell', origin .. '\n' .. report)
  return report
end
