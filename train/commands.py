"""The console scripts around a trained drafter: write it for others, read theirs, examine either."""

from conf import command, named

export = command("train.upload:share")
convert = named("train.convert:convert")
doctor = named("train.doctor:examine")
upload = named("train.upload:upload")
