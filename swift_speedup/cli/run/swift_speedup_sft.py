"""``swift sft`` with the plugin; started by ms-swift's own launcher, once per rank."""
from swift_speedup.hosts.ms_swift import run_command

if __name__ == '__main__':
    run_command('sft')
