"""Programs on a mesh: functions of each rank's shards, with collectives by the names of axes."""
