{% include "header.sh" %}
# Start it with: bash FILE
{% if nodes > 1 %}
# Under a scheduler mpirun knows the hosts; else name a file that lists them: HOSTS=hosts.txt bash FILE
# Its lines for Open MPI: node01 slots={{ ranks_per_node }}    for MPICH: node01:{{ ranks_per_node }}
{% endif %}

{% if setup and nodes > 1 %}
known=$(compgen -e)
{% endif %}
{% include "body.sh" %}
{% if nodes > 1 %}

# Rank 0 tells the others where it is by MPI, which needs mpi4py. Without it, name the host of rank 0 and a free port:
# export MASTER_ADDR=node01 MASTER_PORT=29500
{% endif %}

# One process a GPU{% if cpus_per_rank %}, each with {{ cpus_per_rank }} cores{% endif %}. Open MPI and MPICH spell it differently.
options=(-n {{ world }})
# Open MPI takes along to other hosts only what it is told to{% if setup and nodes > 1 %}: also what the lines above have exported{% endif %}.
forward=(PATH LD_LIBRARY_PATH PYTHONPATH {% for item in environment if not item.off %}{{ item.name }} {% endfor %}MASTER_ADDR MASTER_PORT VITRAIL_CREDENTIALS)
{% if setup and nodes > 1 %}
for variable in $(compgen -e); do
  grep -qxF "$variable" <<<"$known" || [[ " ${forward[*]} " = *" $variable "* ]] || forward+=("$variable")
done
{% endif %}
case "$(mpirun --version 2>&1)" in
*"Open MPI"* | *OpenRTE*)
  options+=(--map-by "ppr:{{ ranks_per_node }}:node{% if cpus_per_rank %}:PE={{ cpus_per_rank }}{% endif %}")
{% if not cpus_per_rank %}
  options+=(--bind-to none)
{% endif %}
  [ -z "${HOSTS:-}" ] || options+=(--hostfile "$HOSTS")
  for variable in "${forward[@]}"; do
    [ -z "${!variable:-}" ] || options+=(-x "$variable")
  done
  ;;
*)
  options+=(-ppn {{ ranks_per_node }} -genvall)
  [ -z "${HOSTS:-}" ] || options+=(-f "$HOSTS")
  ;;
esac

# mpirun kills its processes at SIGTERM and Ctrl-C, but passes SIGUSR1 on to them, at which they save and end with 75.
# So it gets that in their place; a second Ctrl-C ends all at once. It stands in a group of its own, away from Ctrl-C.
set -m
mpirun "${options[@]}" {{ command }} </dev/null &
set +m
pid=$! stop=USR1 asked=
trap 'asked=yes; kill -USR1 "$pid"' TERM USR1
trap 'asked=yes; kill -"$stop" "$pid"; stop=TERM' INT
while true; do
  asked='' code=0
  wait "$pid" || code=$?
  [ -n "$asked" ] && [ "$code" -gt 128 ] || exit "$code"
done
