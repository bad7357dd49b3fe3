#!lua flags=allow-oom
-- Spends units of windows; each opens with its first unit and closes windowMs later.
-- ARGV now (shared clock, µs), windowMs, then per window: limit, how many units; KEYS the windows, in the same order.
-- Returns per window: how many units were granted, how many are left, µs until it closes.
local now, window = tonumber(ARGV[1]), tonumber(ARGV[2])
local found = redis.call('MGET', unpack(KEYS))
local windows, reply = {}, {}
for n, key in ipairs(KEYS) do
  local limit, units = tonumber(ARGV[1 + 2 * n]), tonumber(ARGV[2 + 2 * n])
  -- A window may stand here twice, when its limit has just changed.
  local kept = windows[key] or (found[n] and cmsgpack.unpack(found[n]))
  if not kept or now >= kept[1] then kept = { now + 1000 * window, 0 } end
  windows[key] = kept
  local granted = math.max(0, math.min(units, limit - kept[2]))
  if granted > 0 then
    kept[2] = kept[2] + granted
    redis.call('SET', key, cmsgpack.pack(kept), 'PX', 2 * window)
  end
  reply[#reply + 1] = granted
  reply[#reply + 1] = math.max(0, limit - kept[2])
  reply[#reply + 1] = string.format('%d', kept[1] - now)
end
return reply
