{% include "header.sh" %}
# Submit it with: sbatch FILE
#SBATCH --job-name={{ name }}
#SBATCH --nodes={{ nodes }}
#SBATCH --ntasks-per-node={{ ranks_per_node }}
{% if cpus_per_rank %}
#SBATCH --cpus-per-task={{ cpus_per_rank }}
{% endif %}
{% if not cpus_per_rank %}
# No cores were asked for, and Slurm may then give a task a single one: write this again with --cpus-per-rank N.
{% endif %}
{% if ask_gpus %}
#SBATCH --gpus-per-node={{ ranks_per_node }}
{% endif %}
{% for option in sbatch %}
#SBATCH {{ option }}
{% endfor %}
#SBATCH --output=slurm-%x-%j.out
{% if requeue %}
# The tasks get SIGUSR1 {{ signal_seconds }} s before the time limit, a training saves then, and all end with 75; see the last lines.
#SBATCH --signal=USR1@{{ signal_seconds }}
#SBATCH --requeue
# A job that comes back writes on in the same file.
#SBATCH --open-mode=append
{% else %}
# The tasks get SIGUSR1 {{ signal_seconds }} s before the time limit, a training saves then, and all end with 75.
#SBATCH --signal=USR1@{{ signal_seconds }}
#SBATCH --no-requeue
{% endif %}

{% include "body.sh" %}

# One task a GPU. When one ends, the others have 120 s to end, too: a rank that failed must not leave them waiting.
code=0
srun --kill-on-bad-exit=0 --wait=120{% for option in srun %} {{ option }}{% endfor %} \
  {{ command }} || code=$?

{% if requeue %}
# 75 is a training that was stopped and saved: queue it again, and it goes on from its newest checkpoint.
# Any other code is its end. The count is against jobs that never get anywhere.
if [ "$code" -eq 75 ]; then
  if [ "${SLURM_RESTART_COUNT:-0}" -ge {{ max_restarts }} ]; then
    echo "stopped, and not queued again: this was start {{ max_restarts }} after the first; submit the script again to go on"
  elif scontrol requeue "$SLURM_JOB_ID"; then
    echo "stopped; job $SLURM_JOB_ID is queued again"
    exit 0
  else
    echo "stopped, but Slurm did not queue it again; submit the script again to go on"
  fi
fi
{% endif %}
exit "$code"
