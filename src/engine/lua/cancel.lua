#!lua flags=allow-oom
-- Ends a task for its owner. ARGV 3 results ttl, 4 id, 5 tenant, 6 mode, then the shard.
-- Mode `owner`: asked for. `abandoned`: the caller hung up. `read`: the owner has the outcome; it is
-- forgotten when nobody shares it.
local ttl, id, tenant, mode = tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6]
read_shards(7)
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
    if holder and pieces(holder, 1)[1] == id then redis.call('DEL', sh.base .. 'k:' .. key) end
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
  fail(sh, id, st, outcome(sh, 'CANCELLED', 'cancelled before it ran', st, (body_of(sh, id))), '0', ttl)
  return 'cancelled'
end

local reply = cancel()
return { reply, close(), ended }
