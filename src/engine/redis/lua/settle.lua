#!lua flags=allow-oom
-- Ends tasks of one bundle. KEYS 1 the bundle, 2 never written.
-- ARGV the batcher, whose bad news counts only while it holds the task, or "" for good news; then per task: field, outcome.
-- Returns per task: 1 taken (also before), 0 too late, -1 no such record, -2 another batcher holds it.
local bundle, me = KEYS[1], ARGV[1]
local reply = {}
local owner, meta = unpack(redis.call('HMGET', bundle, 'o', 'm'))
for at = 2, #ARGV, 2 do
  local field, outcome = ARGV[at], ARGV[at + 1]
  local final, own, late = unpack(redis.call('HMGET', bundle, field, 'o' .. field, 'm' .. field))
  if final then reply[#reply + 1] = final == outcome and 1 or 0
  elseif not (meta or late) then reply[#reply + 1] = -1
  elseif me ~= '' and (own or owner or me) ~= me then reply[#reply + 1] = -2
  else
    redis.call('HSET', bundle, field, outcome)
    reply[#reply + 1] = 1
  end
end
return reply
