#!lua flags=allow-oom
-- The record under an id, and with a gateway: tell it of the end. Either the end is seen here or it will be
-- told; there is no moment between the two.
-- ARGV 3 id, 4 gateway or '', 5 whether only for a tenant, 6 which, then the shard.
-- Returns {'e', frame} or {'p', place, attempt, queuedAt, batch, meta, body}.
local id, gateway = ARGV[3], ARGV[4]
local function foreign(tenant) return ARGV[5] == '1' and tenant ~= ARGV[6] end
read_shards(7)
local sh = order[1]
local st = state_of(sh, id)
if not st then
  local found = find_result(sh, id)
  return found and not foreign(found.tenant) and { 'e', found.frame } or nil
end
if foreign(st[TENANT]) then return nil end
if gateway ~= '' and not string.find(',' .. st[GATEWAYS] .. ',', ',' .. gateway .. ',', 1, true) then
  st[GATEWAYS] = st[GATEWAYS] == '' and gateway or st[GATEWAYS] .. ',' .. gateway
  keep(sh, id, st)
  write_states(sh)
end
local meta, body = body_of(sh, id)
return { 'p', st[PLACE], tostring(st[ATTEMPT]), text(st[QUEUED]), batch_of(sh, st), meta, body }
