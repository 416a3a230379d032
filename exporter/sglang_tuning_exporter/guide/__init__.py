"""What the tuning guide knows: the only place where a threshold, a sentence of advice or a guide reference lives. Pure."""
