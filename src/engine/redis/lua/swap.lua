#!lua
-- Lets a key stand for another value, if it still stands for the old one or for nothing. KEYS 1 the key.
-- ARGV old value, new value, ms to live ("" new value: it goes). Returns what it stood for otherwise.
local found = redis.call('GET', KEYS[1])
if found and found ~= ARGV[1] then return found end
if ARGV[2] == '' then redis.call('DEL', KEYS[1]) else redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) end
return false
