#!lua
-- Takes tasks in: each is answered, joined, queued or refused, in one atomic act. Its body was written right
-- before, with a short time to live that ends here when it is queued. No allow-oom: a full Redis refuses
-- before anything is written, and goes on finishing what it has.
-- ARGV 3 gateway, 4 maxQueued, 5 maxBytes, 6 results ttl, 7 key ttl, then the shards, then per task:
--   shard's place, id, tenant, family, tier, deadline, queueMs, join key, cache digest, key digest,
--   fingerprint, bytes, parameters
local gateway, max_queued, max_bytes = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local ttl, key_ttl = tonumber(ARGV[6]), ARGV[7]
local at = read_shards(8)
local parameters, replies = {}, {}

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
  st[EXPIRES] = math.max(st[EXPIRES], math.min(st[DEADLINE], now + queue_ms))
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
  local counts = counters(sh)
  if counts[1] + sh.queued >= max_queued then return 'n' end
  if counts[2] + sh.bytes + bytes > max_bytes then return 'b' end
end

local function answered(sh, id, found)
  local frame = whole_frame(sh, found)
  return frame and { 'd', id, frame, '0' }
end

local function answer_cached(sh, id, cached, tenant, key, fingerprint)
  local ref = string.sub(cached, 9)
  local kept = redis.call('GET', sh.base .. ref)
  if not kept then return nil end
  local st = { [KEYS_OF] = '' }
  bind(sh, st, id, key, fingerprint)
  local meta = body_of(sh, id)
  local own = piece('') .. piece('') .. piece('0') .. piece(text(now)) .. piece(text(now)) .. piece('1') .. piece('')
    .. piece(meta)
  local head = { tenant, 0, key ~= '' and 1 or 0, key, now + ttl, 1 }
  redis.call('SET', sh.base .. 'r:' .. id, result(head, ref, 0, own), 'PX', ttl)
  redis.call('PEXPIRE', sh.base .. ref, ttl, 'GT')
  local parts, mine = pieces(kept, 8), pieces(own, 8)
  mine[2], mine[7] = parts[2], parts[7]
  for n, part in ipairs(mine) do mine[n] = piece(part) end
  return { 'd', id, table.concat(mine), '1' }
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
  if found and found.retryable == 0 and found.tenant == tenant then return answered(sh, bound[1], found) end
end

-- By what is known already; nil when it must be queued.
local function share(sh, id, tenant, tier, deadline, queue_ms, join_key, cache, key, fingerprint)
  local reply = key ~= '' and keyed(sh, tenant, tier, deadline, queue_ms, key, fingerprint)
  if reply then return reply end
  local cached = cache ~= '' and redis.call('GET', sh.base .. 'c:' .. cache)
  if cached and struct.unpack('>d', cached) > now then
    reply = answer_cached(sh, id, cached, tenant, key, fingerprint)
    if reply then return reply end
  end
  local leader = join_key ~= '' and redis.call('HGET', sh.base .. 'j', join_key)
  local st = leader and state_of(sh, leader)
  if st and st[TENANT] == tenant then
    st[JOINS] = st[JOINS] + 1
    accommodate(sh, leader, st, tier, deadline, queue_ms)
    bind(sh, st, leader, key, fingerprint)
    return join(sh, leader, st)
  end
end

local function put(sh, id, tenant, family, tier, deadline, queue_ms, join_key, cache, key, fingerprint, bytes, params)
  local body = sh.base .. 'b:' .. id
  -- 0: it is not there, or it was put before and is kept.
  local fresh = redis.call('PERSIST', body) == 1
  local known = not fresh and state_of(sh, id)
  if known then return join(sh, id, known) end
  local reply
  if redis.call('EXISTS', sh.base .. 'r:' .. id) == 1 then
    local found = find_result(sh, id)
    reply = found and answered(sh, id, found)
  end
  reply = reply or share(sh, id, tenant, tier, deadline, queue_ms, join_key, cache, key, fingerprint)
  local bound = not reply and bound_reached(sh, bytes)
  if bound then reply = { 'f', bound } end
  if reply then
    redis.call('UNLINK', body)
    return reply
  end
  if not fresh then return 'm' end -- its body did not come: send both again
  local st = { 'q', '', '', family, tier, 0, '', 0, 0, 0, 0, deadline, math.min(deadline, now + queue_ms), now, bytes,
    tenant, 0, gateway, '', join_key, '' }
  enter(sh, id, st, 'n', params)
  if params ~= '' then parameters[st[STREAM]] = params end
  sh.queued = sh.queued + 1
  sh.bytes = sh.bytes + bytes
  bind(sh, st, id, key, fingerprint)
  if join_key ~= '' then redis.call('HSET', sh.base .. 'j', join_key, id) end
  keep(sh, id, st)
  return 'q'
end

while at <= #ARGV do
  replies[#replies + 1] = put(order[tonumber(ARGV[at])], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], tonumber(ARGV[at + 4]),
    tonumber(ARGV[at + 5]), tonumber(ARGV[at + 6]), ARGV[at + 7], ARGV[at + 8], ARGV[at + 9], ARGV[at + 10],
    tonumber(ARGV[at + 11]), ARGV[at + 12])
  at = at + 13
end
return { replies, close(parameters) }
