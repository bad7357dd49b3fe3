#!lua flags=allow-oom
-- One beat of one member: it lives, renews what it holds, takes its share, hears what to give back.
-- The rules are in src/workers/fleet/registry.ts. All keys share one hash tag.
--
-- KEYS  1 beats   sorted set  member id -> when it last beat, ms of this server's clock
--       2 docs    hash        member id -> what it says of itself (JSON; not read here)
--       3 lists   hash        member id -> "<number of the beat> <SHA-1 of its list>"
--       4 leases  hash        worker -> "<number of the beat that took it> <member id>"
--       5 texts   hash        SHA-1 -> list (most members have the same)
--       6 grace   string      until when nothing changes hands
--       7 alive   hash        member id -> its own aliveMs; missing from older versions: then the caller's
-- ARGV  1 member id   2 aliveMs   3 number of this beat   4 doc
--       5 the workers it lists: [[model, [worker, ...]], ...]
--       6 the workers it holds by its own clock, the one it can best do without first: [worker, ...]
--       7 those of them it was told to give back and runs nothing on: [worker, ...]
--       8 the time, for tests; left out: this server's
-- Reply {held, giveBack, {{model, unheld worker}, ...}, {{member id, age in ms, doc}, ...}}
local BEATS, DOCS, LISTS, LEASES, TEXTS, GRACE, ALIVE = unpack(KEYS)
local me, alive, number = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local claims, releasing = cjson.decode(ARGV[6]), {}
for _, worker in ipairs(cjson.decode(ARGV[7])) do releasing[worker] = true end
local now = tonumber(ARGV[8])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end

-- A beat that was overtaken by a later one (its connection was given up, its bytes came through) must not
-- release a worker that has been put to use since.
local last = redis.call('HGET', LISTS, me)
if last and number <= tonumber(string.match(last, '^%d+')) then
  return redis.error_reply('OVERTAKEN a later beat of this member was heard before')
end

-- Each member is judged by its own aliveMs: one that beats more slowly than the caller is not dead for that.
redis.call('HSET', ALIVE, me, ARGV[2])
local alive_of, longest = {}, alive
local said = redis.call('HGETALL', ALIVE)
for i = 1, #said, 2 do
  alive_of[said[i]] = tonumber(said[i + 1])
  longest = math.max(longest, alive_of[said[i]])
end

-- Who lives. A beat from so far in the future was written before the clock was set back: who wrote it is not dead,
-- though it is not known here until it beats again.
local age, heard, setBack = {}, false, false
local beats = redis.call('ZRANGE', BEATS, 0, -1, 'WITHSCORES')
for i = 1, #beats, 2 do
  local id, ms = beats[i], now - tonumber(beats[i + 1])
  local its = alive_of[id] or alive
  if ms >= its or ms <= -its then
    redis.call('ZREM', BEATS, id)
    redis.call('HDEL', DOCS, id)
    redis.call('HDEL', LISTS, id)
    if id ~= me then redis.call('HDEL', ALIVE, id) end
    setBack = setBack or ms < 0
  else
    age[id] = math.max(0, ms)
    heard = heard or ms < its / 2
  end
end

-- Grace: the registry, not the members, was away. Half of aliveMs, because the beats that come in together
-- after a pause of about aliveMs would else find some members dead and others not.
local silent = (not heard or setBack) and redis.call('EXISTS', LEASES) == 1
local forgotten = #claims > 0 and not age[me]
local graceMs = tonumber(redis.call('GET', GRACE) or 0) - now
local grace = graceMs > 0 and graceMs <= longest
if not grace and (silent or forgotten) then
  grace = true
  redis.call('SET', GRACE, now + longest, 'PX', longest * 10)
end

age[me] = 0
redis.call('ZADD', BEATS, now, me)
redis.call('HSET', DOCS, me, ARGV[4])
local list = redis.sha1hex(ARGV[5])
redis.call('HSET', LISTS, me, ARGV[3] .. ' ' .. list)
redis.call('HSETNX', TEXTS, list, ARGV[5])
local ids = {}
for id in pairs(age) do ids[#ids + 1] = id end
table.sort(ids)

-- Who lists what. Members with the same list form a group, and their list is read once. Workers of one
-- model that the same groups list are of one kind: nothing below tells them apart.
local groups, groupOf, numberOf, byList, workers, kindOf, listers, modelOf = {}, {}, {}, {}, {}, {}, {}, {}
for i, said in ipairs(redis.call('HMGET', LISTS, unpack(ids))) do
  local beat, list = string.match(said or '0 ', '^(%d+) (.*)$')
  numberOf[ids[i]] = beat
  local group = byList[list]
  if not group then
    group = { ids = {}, has = {} }
    groups[#groups + 1] = group
    byList[list] = group
    for _, listing in ipairs(cjson.decode(redis.call('HGET', TEXTS, list) or '[]')) do
      for _, worker in ipairs(listing[2]) do
        if not modelOf[worker] then
          workers[#workers + 1] = worker
          modelOf[worker] = listing[1]
          listers[worker] = #groups
        elseif not group.has[worker] then
          listers[worker] = listers[worker] .. ' ' .. #groups
        end
        group.has[worker] = true
      end
    end
  end
  table.insert(group.ids, ids[i])
  groupOf[ids[i]] = group
end
if redis.call('HLEN', TEXTS) > #groups then
  for _, list in ipairs(redis.call('HKEYS', TEXTS)) do
    if not byList[list] then redis.call('HDEL', TEXTS, list) end
  end
end
local kinds, count = {}, {}
for _, worker in ipairs(workers) do
  local model, by = modelOf[worker], listers[worker]
  count[model] = count[model] or {}
  kinds[model] = kinds[model] or {}
  local kind = kinds[model][by]
  if not kind then
    kind = { model = model, count = count[model], groups = {}, of = {} }
    for at in string.gmatch(by, '%d+') do table.insert(kind.groups, groups[tonumber(at)]) end
    kinds[model][by] = kind
    table.insert(kinds, kind)
  end
  kindOf[worker] = kind
end

-- Who holds what now, and in `plan` who will: members that live and list the worker.
local holder, takenBy, plan, total, least = {}, {}, {}, {}, {}
for _, id in ipairs(ids) do total[id] = 0 end
local function give(worker, id, n)
  local counts = kindOf[worker].count
  counts[id] = (counts[id] or 0) + n
  total[id] = total[id] + n
  least = {}
  if n > 0 then plan[worker] = id end
end
local function take(worker)
  redis.call('HSET', LEASES, worker, ARGV[3] .. ' ' .. me)
  holder[worker] = me
end
local leases = redis.call('HGETALL', LEASES)
for i = 1, #leases, 2 do
  local worker = leases[i]
  local beat, id = string.match(leases[i + 1], '^(%d+) (.*)$')
  if age[id] or grace then
    holder[worker] = id
    takenBy[worker] = beat
    if age[id] and groupOf[id].has[worker] then give(worker, id, 1) end
  else
    redis.call('HDEL', LEASES, worker)
  end
end
if forgotten then
  for _, worker in ipairs(claims) do
    if groupOf[me].has[worker] and not holder[worker] then
      take(worker)
      give(worker, me, 1)
    end
  end
end

-- Who is next to get a worker of this kind: the one with fewest of its model, then fewest of all, then by id.
local function before(a, b, counts)
  local inModel = (counts[a] or 0) - (counts[b] or 0)
  if inModel ~= 0 then return inModel < 0 end
  if total[a] ~= total[b] then return total[a] < total[b] end
  return a < b
end
local function next_for(kind)
  if not least[kind] then
    local best
    for _, group in ipairs(kind.groups) do
      for _, id in ipairs(group.ids) do
        if not best or before(id, best, kind.count) then best = id end
      end
    end
    least[kind] = best
  end
  return least[kind]
end

-- A worker that changes hands: nobody's, or taken by the last beat of its holder, whose doc was written before.
local unheld = {}
local function note(worker) unheld[#unheld + 1] = { modelOf[worker], worker } end
for _, worker in ipairs(workers) do
  if not holder[worker] and not grace then
    local id = next_for(kindOf[worker])
    give(worker, id, 1)
    if id == me then take(worker) end
  end
  local id = holder[worker]
  if not age[id or ''] or (id ~= me and takenBy[worker] == numberOf[id]) then note(worker) end
end

-- Evens out: the largest difference first; of two that are equal, the later id gives. Each step makes the
-- spread smaller, so it ends; the bound is for a mistake in this sentence.
local function step()
  local kind, giver, most, mostOfAll = nil, nil, 0, 0
  for _, each in ipairs(kinds) do
    local to = next_for(each)
    for _, from in ipairs(ids) do
      if each.of[from] and #each.of[from] > 0 and from ~= to then
        local more = (each.count[from] or 0) - (each.count[to] or 0)
        local moreOfAll = total[from] - total[to]
        local better = more > most or (more == most and (moreOfAll > mostOfAll
          or (moreOfAll == mostOfAll and giver and from > giver)))
        if better and (more >= 2 or (more == 1 and moreOfAll >= 2)) then
          kind, giver, most, mostOfAll = each, from, more, moreOfAll
        end
      end
    end
  end
  if not kind then return false end
  local to, worker = next_for(kind), table.remove(kind.of[giver])
  give(worker, giver, -1)
  give(worker, to, 1)
  kind.of[to] = kind.of[to] or {}
  table.insert(kind.of[to], worker)
  return true
end
if not grace then
  -- Givers give from the end, so what the caller can best do without comes last.
  local claimed = {}
  local function place(worker)
    local of, id = kindOf[worker].of, plan[worker]
    of[id] = of[id] or {}
    table.insert(of[id], worker)
  end
  for _, worker in ipairs(claims) do claimed[worker] = plan[worker] == me end
  for _, worker in ipairs(workers) do if plan[worker] and not claimed[worker] then place(worker) end end
  for i = #claims, 1, -1 do if claimed[claims[i]] then place(claims[i]) end end
  local left = 2 * #workers
  while left > 0 and step() do left = left - 1 end
end

local held, giveBack = {}, {}
for worker, id in pairs(holder) do
  if id == me then
    local leaves = plan[worker] ~= me
    if leaves and releasing[worker] then
      redis.call('HDEL', LEASES, worker)
      if modelOf[worker] then note(worker) end
    else
      held[#held + 1] = worker
      if leaves then giveBack[#giveBack + 1] = worker end
    end
  end
end

-- Nothing is left behind by a fleet that is no more.
for i = 1, 7 do if i ~= 6 then redis.call('PEXPIRE', KEYS[i], longest * 10) end end
local members = {}
for i, doc in ipairs(redis.call('HMGET', DOCS, unpack(ids))) do
  members[i] = { ids[i], age[ids[i]], doc }
end
return { held, giveBack, unheld, members }
