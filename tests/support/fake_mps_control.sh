#!/bin/sh
# Stands in for nvidia-cuda-mps-control: answers one command, from the files of the folder EPD_FAKE_MPS_DIR, and
# notes it in `asked` there. servers: answer to get_server_list; clients-N: to get_client_list N; says: to
# terminate_client, in place of a true one's "0"; exit: what it exits with then; hang: it never answers
# terminate_client; hold: as long as it is there, get_client_list is not answered.
read -r command server client
echo "$command${server:+ $server}${client:+ $client}" >> "$EPD_FAKE_MPS_DIR/asked"
cd "$EPD_FAKE_MPS_DIR" || exit 9
case $command in
  get_server_list) cat servers ;;
  get_client_list)
    while [ -f hold ]; do sleep 0.01; done
    [ ! -f "clients-$server" ] || cat "clients-$server"
    ;;
  terminate_client)
    [ ! -f hang ] || exec sleep 60
    if [ -f says ]; then cat says; else echo 0; fi
    [ ! -f exit ] || exit "$(cat exit)"
    ;;
  *) echo "Unknown command \"$command\"" ;;
esac
