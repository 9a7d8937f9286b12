{% include "header.sh" %}
# Start it with: bash FILE
{% if nodes > 1 %}
# Under a scheduler mpirun knows the hosts; else name a file that lists them: HOSTS=hosts.txt bash FILE
{% endif %}

{% include "body.sh" %}
{% if nodes > 1 %}

# Rank 0 tells the others where it is by MPI, which needs mpi4py. Without it, name the host of rank 0 and a free port:
# export MASTER_ADDR=node01 MASTER_PORT=29500
{% endif %}

# One process a GPU{% if cpus_per_rank %}, each with {{ cpus_per_rank }} cores{% endif %}. Open MPI and MPICH spell it differently.
options=(-n {{ world }})
forward=({% for item in environment if not item.off %}{{ item.name }} {% endfor %}MASTER_ADDR MASTER_PORT)
if mpirun --version 2>&1 | grep -q "Open MPI"; then
  options+=(--map-by "ppr:{{ ranks_per_node }}:node{% if cpus_per_rank %}:PE={{ cpus_per_rank }}{% endif %}")
{% if not cpus_per_rank %}
  options+=(--bind-to none)
{% endif %}
  [ -z "${HOSTS:-}" ] || options+=(--hostfile "$HOSTS")
  for variable in "${forward[@]}"; do
    [ -z "${!variable:-}" ] || options+=(-x "$variable")
  done
else
  options+=(-ppn {{ ranks_per_node }} -genvall)
  [ -z "${HOSTS:-}" ] || options+=(-f "$HOSTS")
fi
exec mpirun "${options[@]}" {{ command }}
