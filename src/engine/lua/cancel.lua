#!lua flags=allow-oom
-- Ends a task for its owner. ARGV 3 results ttl, 4 id, 5 tenant, 6 mode, then the shard.
-- Mode `owner`: asked for. `abandoned`: the caller hung up. `read`: the owner has the outcome; it is
-- forgotten when nobody shares it.
local ttl, id, tenant, mode = tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6]
read_shards(7)
local sh = order[1]

-- An output that the cache may still give to others stays for as long as it does.
local function forget(found)
  redis.call('DEL', sh.base .. 'r:' .. id)
  if found.ref ~= '' and found.cached == 0 then redis.call('UNLINK', sh.base .. found.ref) end
  for key in string.gmatch(found.keys, '%S+') do
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
    if mode == 'abandoned' or (mode == 'read' and found.shared == 1) then return 'kept' end
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
  finish(sh, id, st, '', outcome('CANCELLED', 'cancelled before it ran', st, (body_of(sh, id))), 0, ttl)
  return 'cancelled'
end

local reply = cancel()
return { reply, close(), ended }
