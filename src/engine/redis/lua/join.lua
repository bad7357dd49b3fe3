#!lua flags=allow-oom
-- Reads a task's record; with a gateway named, that one is told of its end.
-- KEYS 1 the bundle, 2 never written. ARGV field, gateway or "", 1: an Idempotency-Key stands for it from now on,
-- deadline (shared clock, µs) and tier that a caller brings or "", ms to keep the bundle for.
-- Returns outcome, deleted, meta, owner, state, waiting gateways, key, what callers who joined brought; false where there is none.
local bundle, field, gateway, keyed, deadline, tier, keep = KEYS[1], unpack(ARGV)
local names = { field, 'g', 'm', 'o', 's', 'w', 'k', 'p' }
for at = 2, #names do names[at] = names[at] .. field end
names[#names + 1] = 'm'
names[#names + 1] = 'o'
local found = redis.call('HMGET', bundle, unpack(names))
local reply = { found[1], found[2], found[3] or found[9], found[4] or found[10], found[5], found[6], found[7], found[8] }
if found[1] or not reply[3] then return reply end
if keyed == '1' and not found[7] then redis.call('HSET', bundle, 'k' .. field, '1', 'x', '1') end
if gateway ~= '' then
  local waiting = ',' .. (found[6] or '') .. ','
  local listed = string.find(waiting, ',' .. gateway .. ',', 1, true)
  -- A poll brings no deadline: it waits for the end and does not block a cancel.
  if deadline == '' then
    listed = listed or string.find(waiting, ',~' .. gateway .. ',', 1, true)
    gateway = '~' .. gateway
  end
  if not listed then
    redis.call('HSET', bundle, 'w' .. field, found[6] and found[6] ~= '' and found[6] .. ',' .. gateway or gateway, 'x', '1')
  end
end
if deadline ~= '' then
  local latest, best = tonumber(deadline), tonumber(tier)
  if found[8] then
    local old_deadline, old_tier = string.match(found[8], '^(%d+) (%d+)$')
    latest, best = math.max(latest, tonumber(old_deadline)), math.min(best, tonumber(old_tier))
  end
  redis.call('HSET', bundle, 'p' .. field, string.format('%d %d', latest, best), 'x', '1')
  if redis.call('PTTL', bundle) < tonumber(keep) then redis.call('PEXPIRE', bundle, keep) end
end
return reply
