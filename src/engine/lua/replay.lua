#!lua flags=allow-oom
-- A dead letter starts anew under its own id; twice is once.
-- ARGV 3 gateway, 4 id, 5 tenant, 6 family, 7 tier, 8 deadline, 9 queueMs, 10 meta, 11 input, 12 parameters, 13 join
-- key, then the shard
local gateway, id = ARGV[3], ARGV[4]
local deadline, queue_ms = tonumber(ARGV[8]), tonumber(ARGV[9])
read_shards(14)
local sh = order[1]
if redis.call('HEXISTS', sh.base .. 'd', id) == 0 or state_of(sh, id) then return { 0, '' } end
local found = find_result(sh, id)
local st = { 'q', '', '', ARGV[6], tonumber(ARGV[7]), 0, '', 0, 0, 0, 0, deadline, math.min(deadline, now + queue_ms), now,
  #ARGV[11], ARGV[5], 0, gateway, '', ARGV[13], '' }
redis.call('SET', sh.base .. 'b:' .. id, piece(ARGV[10]) .. ARGV[11])
enter(sh, id, st, 'n', ARGV[12])
-- Its keys, unless they stand for a task that ran meanwhile.
for key in string.gmatch(found and found.keys or '', '%S+') do
  local holder = redis.call('GET', sh.base .. 'k:' .. key)
  if holder and pieces(holder, 1)[1] == id then st[KEYS_OF] = st[KEYS_OF] == '' and key or st[KEYS_OF] .. ' ' .. key end
end
if ARGV[13] ~= '' then redis.call('HSET', sh.base .. 'j', ARGV[13], id) end
sh.queued = 1
sh.bytes = #ARGV[11]
keep(sh, id, st)
redis.call('DEL', sh.base .. 'r:' .. id)
redis.call('HDEL', sh.base .. 'd', id)
redis.call('ZREM', sh.base .. 'dz', id)
return { 1, close({ [st[STREAM]] = ARGV[12] }) }
