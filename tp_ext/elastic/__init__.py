"""Data parallelism over replicas that come and go; users see it as ``tp_ext.parallel.ElasticData``."""

from tp_ext.elastic.elastic_data import ElasticData
from tp_ext.elastic.lost import ReplicaLost

__all__ = ["ElasticData", "ReplicaLost"]
