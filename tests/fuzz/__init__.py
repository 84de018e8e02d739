"""Every decoder and every HTTP endpoint, fed with what nobody would send on purpose, or only on purpose."""
