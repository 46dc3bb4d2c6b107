"""The processes that share out one worker's model, and where they meet in each epoch."""

from worker_service.models.ranks.rank_group import RankGroup

__all__ = ["RankGroup"]
