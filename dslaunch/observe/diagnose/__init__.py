"""What a training log says of its numbers: any DeepSpeed, Megatron or apex log, or a run directory.

source   bytes of a file, .gz or stdin -> the few lines that may say something
shapes   such a line -> records (an overflow, a loss, a step)
story    records in order -> what happened, in constant memory
course   the loss scale over the steps, with the growths that nobody logged
verdicts a story -> what it means, the evidence, and the next thing to try
read     the way from paths to a Diagnosis
"""
