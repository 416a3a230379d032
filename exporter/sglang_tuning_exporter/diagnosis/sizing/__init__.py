"""Values to set flags to, computed from the facts and the load of the running server; one function for each row. Pure."""
