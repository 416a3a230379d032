"""Where a server's words come from: its log (`tail`) and its HTTP port (`scrape`)."""
