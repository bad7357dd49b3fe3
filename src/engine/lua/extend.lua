#!lua flags=allow-oom
-- Holds tasks of a lease until later.
-- ARGV 3 token, 4 until, then the shards, then per task: shard's place, id. Returns the places of those not held.
local token, lease_until = ARGV[3], tonumber(ARGV[4])
local at = read_shards(5)
local lost, place = {}, 0
while at <= #ARGV do
  local sh, id = order[tonumber(ARGV[at])], ARGV[at + 1]
  local st = state_of(sh, id)
  if st and st[PLACE] == 'r' and st[TOKEN] == token then
    st[UNTIL] = lease_until
    keep(sh, id, st)
  else
    lost[#lost + 1] = place
  end
  place = place + 1
  at = at + 2
end
close()
return lost
