/* Checks the numbers that src/layout.rs asserts against the headers of libpsm2-dev. */
#include <psm2.h>
#include <psm2_mq.h>
#include <stddef.h>

#define HOLDS(condition) _Static_assert (condition, #condition)

HOLDS (sizeof (psm2_mq_tag_t) == 16);
HOLDS (sizeof (psm2_mq_status_t) == 32 && offsetof (psm2_mq_status_t, error_code) == 16);
HOLDS (sizeof (psm2_mq_status2_t) == 64 && offsetof (psm2_mq_status2_t, msg_tag) == 16);
HOLDS (offsetof (psm2_mq_status2_t, msg_length) == 32
       && offsetof (psm2_mq_status2_t, context) == 48);
HOLDS (sizeof (psm2_mq_stats_t) == 29 * 8 && offsetof (psm2_mq_stats_t, tx_rndv_bytes) == 64);
HOLDS (sizeof (struct psm2_ep_open_opts) == 64
       && offsetof (struct psm2_ep_open_opts, imm_size) == 56);
HOLDS (sizeof (psm2_epid_t) == 8 && sizeof (psm2_uuid_t) == 16 && sizeof (psm2_error_t) == 4);
HOLDS (sizeof (psm2_epconn_t) == 24 && offsetof (psm2_epconn_t, mq) == 16
       && PSM2_IQ_INVALID_QUERY == 71);
HOLDS (sizeof (psm2_ep_t) == 8 && sizeof (psm2_mq_t) == 8 && sizeof (psm2_mq_req_t) == 8);
HOLDS (PSM2_PARAM_ERR == 3 && PSM2_NO_MEMORY == 4 && PSM2_INIT_NOT_INIT == 5
       && PSM2_INTERNAL_ERR == 8);
HOLDS (PSM2_TIMEOUT == 11 && PSM2_TOO_MANY_ENDPOINTS == 12 && PSM2_EP_DEVICE_FAILURE == 23);
HOLDS (PSM2_EP_CLOSE_TIMEOUT == 24 && PSM2_EP_NO_NETWORK == 26 && PSM2_EPID_UNKNOWN == 40);
HOLDS (PSM2_EPID_UNREACHABLE == 41 && PSM2_EPID_INVALID_UUID_KEY == 45
       && PSM2_EPID_INVALID_VERSION == 46);
HOLDS (PSM2_EPID_NETWORK_ERROR == 49 && PSM2_MQ_NO_COMPLETIONS == 60 && PSM2_MQ_TRUNCATION == 61);
HOLDS (PSM2_MQ_FLAG_SENDSYNC == 1 && PSM2_LIB_REFCOUNT_CAP == 2 && PSM2_MULTI_EP_CAP == 1);

int main (void)
{
  return 0;
}
