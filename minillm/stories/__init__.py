"""The course's own language: stories whose probabilities are known exactly."""

from minillm.stories.language import StoryLanguage

__all__ = ["StoryLanguage"]
