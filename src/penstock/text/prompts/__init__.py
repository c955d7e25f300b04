"""Renders and encodes prompts; long ones in processes that can be killed."""

from penstock.text.prompts.encoder import CHARS_PER_TOKEN, PromptEncoder, PromptTooLong
from penstock.text.prompts.questions import EncodeChat, Encoded, EncodeInfill, EncodePair, EncodeText, PromptQuestion
from penstock.text.prompts.workers import PromptTooSlow, PromptWorkers
