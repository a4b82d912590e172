"""Several schedulers that a trainer uses as one, each with a part of the fleet and the prompts."""

from aprilsched.shards.base import Shard, ShardLost
from aprilsched.shards.local import LocalShard, ShardParts
from aprilsched.shards.scheduler import ShardedScheduler

__all__ = ["LocalShard", "Shard", "ShardLost", "ShardParts", "ShardedScheduler"]
