"""One server over time: events and scrapes in, the state of each signal, counters and facts out. Pure, time is an argument; imports only `sglang`."""
