#!lua flags=allow-oom
-- A dead letter starts anew under its own id; twice is once.
-- ARGV 3 gateway, 4 id, 5 tenant, 6 family, 7 tier, 8 deadline, 9 queueMs, 10 meta, 11 input, 12 parameters, 13 join
-- key, 14 index ttl, 15 maxQueued, 16 maxBytes, then the shard
-- Returns 1 replayed, 0 no such letter, n or b: the bound of `put` that leaves no room; and the report.
local gateway, id = ARGV[3], ARGV[4]
local deadline, queue_ms = tonumber(ARGV[8]), tonumber(ARGV[9])
local bytes = #ARGV[11] + #ARGV[12]
read_shards(17)
local sh = order[1]
if redis.call('HEXISTS', sh.base .. 'd', id) == 0 or state_of(sh, id) then return { '0', '' } end
read_counters({ sh })
if sh.counters[1] >= tonumber(ARGV[15]) then return { 'n', '' } end
if sh.counters[2] + bytes > tonumber(ARGV[16]) then return { 'b', '' } end
local st = { 'q', '', '', ARGV[6], tonumber(ARGV[7]), 0, '', 0, 0, 0, 0, deadline, math.min(deadline, after(queue_ms)), now,
  bytes, ARGV[5], 0, gateway, '' }
st[REPLAYED] = 1
redis.call('SET', sh.base .. 'b:' .. id, piece(ARGV[10]) .. ARGV[11])
enter(sh, id, st, 'n', ARGV[12])
-- Its keys, unless they stand for a task that ran meanwhile.
for key in string.gmatch(redis.call('GET', sh.base .. 'rk:' .. id) or '', '%S+') do
  local holder = redis.call('GET', sh.base .. 'k:' .. key)
  if holder and pieces(holder, 1)[1] == id then st[KEYS_OF] = st[KEYS_OF] == '' and key or st[KEYS_OF] .. ' ' .. key end
end
if ARGV[13] ~= '' then redis.call('SET', sh.base .. 'x:' .. ARGV[13], id, 'PX', ARGV[14]) end
sh.queued = 1
sh.bytes = bytes
keep(sh, id, st)
redis.call('DEL', sh.base .. 'r:' .. id, sh.base .. 'rk:' .. id)
redis.call('HDEL', sh.base .. 'd', id)
redis.call('ZREM', sh.base .. 'dz', id)
return { '1', close({ [st[STREAM]] = ARGV[12] }) }
