#!lua flags=allow-oom
-- Ends a task for its owner. ARGV 3 results ttl, 4 id, 5 tenant, 6 mode, 7 number of the call, 8 how long its reply is
-- kept, then the shard.
-- Mode `owner`: asked for. `abandoned`: the caller hung up. `read`: the owner has the outcome; it is
-- forgotten when nobody shares it.
local ttl, id, tenant, mode = tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6]
read_shards(9)
local sh = order[1]

-- What may still be given to others stays, as nobody's.
local function forget(found)
  local keys = redis.call('GET', sh.base .. 'rk:' .. id) or ''
  if found.reusable > now then
    redis.call('SET', sh.base .. 'r:' .. id, result('', found.retryable, found.expires, found.reusable, found.frame), 'KEEPTTL')
  else
    redis.call('UNLINK', sh.base .. 'r:' .. id)
  end
  for key in string.gmatch(keys, '%S+') do
    local holder = redis.call('GET', sh.base .. 'k:' .. key)
    -- Not deleted at once: where nothing stands, a task may be on its way in (bind.lua).
    if holder and pieces(holder, 1)[1] == id then
      redis.call('SET', sh.base .. 'k:' .. key, piece('') .. piece(''), 'PX', ARGV[8])
    end
  end
  return 'forgotten'
end

local function cancel()
  local st = state_of(sh, id)
  if not st then
    local found = find_result(sh, id)
    if not found or (mode ~= 'read' and found.tenant ~= tenant) then return 'unknown' end
    local shared = mode == 'read' and redis.call('EXISTS', sh.base .. 'rk:' .. id) == 1
    if mode == 'abandoned' or shared then return 'kept' end
    return forget(found)
  end
  if mode == 'read' then return 'kept' end
  if st[TENANT] ~= tenant then return 'unknown' end
  local abandoned = mode == 'abandoned'
  if st[JOINS] > 0 then
    if abandoned then
      st[JOINS] = st[JOINS] - 1
      keep(sh, id, st)
    end
    return 'kept'
  end
  if st[PLACE] == 'r' or (abandoned and st[KEYS_OF] ~= '') then return 'kept' end
  fail(sh, id, st, outcome(sh, 'CANCELLED', 'cancelled before it ran', st, meta_of(sh, id)), '0', ttl)
  return 'cancelled'
end

-- The owner's call is sent again when its reply was lost, and a second cancel means something else than the first: so the
-- reply is kept. It is written in any case: the WAIT that follows counts only from this connection's last write on.
local call, kept = piece(origin .. ' ' .. ARGV[7]), sh.base .. 'c:' .. id
local before = mode == 'owner' and redis.call('GET', kept)
before = before and string.sub(before, 1, #call) == call and pieces(before, 3)
local reply
if before then
  reply = before[2]
  local found = reply == 'cancelled' and find_result(sh, id)
  if found then ended = { id, before[3], found.frame } end
else
  reply = cancel()
end
if mode == 'owner' then redis.call('SET', kept, call .. piece(reply) .. piece(ended[2] or ''), 'PX', ARGV[8]) end
return { reply, close(), ended }
